"""The model of a run before its first step, which no checkpoint holds.

Initial weights are a pure function of the configuration and the seed, so they are computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import Tree
from samestep.errors import CheckpointError
from samestep.hashing import json_hash
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.meta import read_meta
from trainer.strategies import InitialValues
from trainer.training.weights.embeddings import with_embeddings
from trainer.training.weights.initial import choose_layers, reinitialize_layers, stored_values
from trainer.training.weights.loading import Weights, load_weights
from trainer.vectors.folder import WordVectors


@dataclass(frozen=True)
class _Tokenized:
    """The tokenizer of a run's dataset, for `stored_values`. The dataset may be gone."""

    name: str
    tokenizer: Tokenizer


@dataclass(frozen=True)
class StepZero:
    """The start of a run.

    Attributes:
        identity: a digest of everything that determines the initial weights.

    Args:
        settings: the run's, as a checkpoint holds them.
        begun: the run's oldest checkpoint.
        trained: the weights that it began with; None if they were initialized.
        vectors: the word vectors that its token embeddings began with; None if there were none.
    """

    settings: Tree
    begun: Weights
    trained: Weights | None
    vectors: WordVectors | None = None

    @classmethod
    def of(cls, checkpoint: Location) -> StepZero:
        """Opens the start of a run; initializes nothing yet.

        Args:
            checkpoint: folder of the run's oldest checkpoint.

        Raises:
            CheckpointError: it is damaged, the run was imported, or the weights of init_from or the
                vectors of init_embeddings have changed.
            DataError: the vectors are gone.
        """
        meta = read_meta(checkpoint)
        settings, trained = meta["config"], None
        # Not init_from: it may name a run, which has newer checkpoints by now.
        start = meta.get("start") or {}
        if program := start.get("taken_by"):
            raise CheckpointError(
                f"the run was imported from {program}, so its step 0 is not known. Use --revisions "
                "last or best."
            )
        stored, embeddings = start.get("weights"), start.get("embeddings")
        if stored is None and (origin := settings.get("init_from")) is not None:
            raise CheckpointError(
                f"the run did not record with which weights of init_from={origin} it began, so "
                "step 0 cannot be published. Use --revisions last or best."
            )
        if stored is not None:
            trained = load_weights(stored["path"])
            if trained.identity() != stored["identity"]:
                raise CheckpointError(
                    f"{stored['path']} has other weights than when the run began. Restore the "
                    "original ones, or use --revisions last or best."
                )
        vectors = None
        if embeddings is not None:
            vectors = WordVectors.load(embeddings["path"])
            if vectors.origin != embeddings:
                raise CheckpointError(
                    f"{embeddings['path']} has other vectors than when the run began. Restore the "
                    "original ones, or use --revisions last or best."
                )
        begun, initial = load_weights(checkpoint), start.get("initial") or {}
        settings = {**settings, "model": {**settings["model"], **initial}}
        begun = replace(begun, config=begun.config.with_settings(**initial))
        return cls(settings, begun, trained, vectors)

    @property
    def identity(self) -> str:
        names = ("model", "seed", "init_layers", "redraw_layers")
        parts = {name: self.settings.get(name) for name in names}
        parts["init_from"] = None if self.trained is None else self.trained.identity()
        if self.vectors is not None:  # the identity of other runs stays as it was
            parts["init_embeddings"] = self.vectors.origin["identity"]
        return json_hash(parts)

    def weights(self) -> Weights:
        """Initializes the model, as `trainer.training.run` does at the start.

        Raises:
            ConfigError, CheckpointError: init_from holds another model than it did.
        """
        seed = self.settings["seed"]
        with torch.device("meta"):
            model = self.begun.config.build()
        values: InitialValues = partial(model.initial_values, seed=seed)
        dataset = _Tokenized("the run's dataset", self.begun.load_tokenizer())
        if self.trained is not None:
            trained = self.trained
            if layers := self.settings.get("init_layers"):
                trained = choose_layers(trained, layers)
            values = stored_values(trained, model, dataset, seed=seed)
            if count := self.settings.get("redraw_layers"):
                values = reinitialize_layers(values, model, count, seed)
        if self.vectors is not None:
            values = with_embeddings(values, model, self.vectors, dataset)
        tensors = {}
        for name, parameter in model.named_parameters():
            size = math.prod(parameter.shape)
            tensors[name] = values(name, 0, size).view(parameter.shape)
        # Without a step: the checkpoint's facts are a later step's.
        return replace(self.begun, tensors=StoredTensors.of(tensors), step=None, base=None)
