"""The model of a run before its first step, which no checkpoint holds.

Initial weights are a pure function of the configuration and the seed, so they are computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredTensors
from trainer.config import Tree
from trainer.errors import CheckpointError
from trainer.hashing import json_hash
from trainer.training.initial_weights import choose_layers, reinitialize_layers, stored_values
from trainer.training.weights import Weights, load_weights


@dataclass(frozen=True)
class _Tokenized:
    """What `stored_values` needs of a run's dataset, which may be gone: the run has a copy."""

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
    """

    settings: Tree
    begun: Weights
    trained: Weights | None

    @classmethod
    def of(cls, checkpoint: Location) -> StepZero:
        """Opens the start of a run; initializes nothing yet.

        Args:
            checkpoint: folder of the run's oldest checkpoint.

        Raises:
            CheckpointError: it is damaged, or the weights of init_from are gone or have changed.
        """
        meta = integrity.read_meta(checkpoint)
        settings, trained = meta["config"], None
        # Not init_from: it may name a run, which has newer checkpoints by now.
        stored = (meta.get("start") or {}).get("weights")
        if stored is None and (origin := settings.get("init_from")) is not None:
            raise CheckpointError(f"the run has not recorded which weights of {origin} it took")
        if stored is not None:
            trained = load_weights(stored["path"])
            if trained.identity() != stored["identity"]:
                raise CheckpointError(
                    f"{stored['path']} has other weights than when the run began. Bring those back"
                )
        return cls(settings, load_weights(checkpoint), trained)

    @property
    def identity(self) -> str:
        names = ("model", "seed", "init_layers", "redraw_layers")
        parts = {name: self.settings.get(name) for name in names}
        parts["init_from"] = None if self.trained is None else self.trained.identity()
        return json_hash(parts)

    def weights(self) -> Weights:
        """Initializes the model, as `trainer.training.run` does at the start.

        Raises:
            ConfigError, CheckpointError: init_from holds another model than it did.
        """
        seed = self.settings["seed"]
        with torch.device("meta"):
            model = self.begun.config.build()
        values = None
        if self.trained is not None:
            trained = self.trained
            if layers := self.settings.get("init_layers"):
                trained = choose_layers(trained, layers)
            dataset = _Tokenized("the run's dataset", self.begun.load_tokenizer())
            values = stored_values(trained, model, dataset, seed=seed)
            if count := self.settings.get("redraw_layers"):
                values = reinitialize_layers(values, model, count, seed)
        tensors = {}
        for name, parameter in model.named_parameters():
            size = math.prod(parameter.shape)
            if values is None:
                found = model.initial_values(name, 0, size, seed)
            else:
                found = values(name, 0, size)
            tensors[name] = found.view(parameter.shape)
        # Without a step: the checkpoint's facts are a later step's.
        return replace(self.begun, tensors=StoredTensors.of(tensors), step=None, base=None)
