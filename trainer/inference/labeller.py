"""A fine-tuned model that says what it makes of rows: the probability of each class, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.building import task_rows
from data_pipeline.building.task_rows import Encoded
from data_pipeline.packing import parts
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.accelerators import Precision
from trainer.accelerators.detect import for_any_shapes
from trainer.checkpoint import integrity
from trainer.config import Tree, decode
from trainer.errors import ConfigError
from trainer.examples import TaskRow
from trainer.inference.hidden_states import batches
from trainer.objectives import classification, regression
from trainer.objectives.rows import logits as logits_of
from trainer.publish.model_card import manifests_of
from trainer.training.experiment import Experiment
from trainer.training.phases import phase_of
from trainer.training.weights import Weights, load_weights

_LONGEST = 512  # tokens of a row, for a model that does not say


class Labeller:
    """Reads rows as a model did when it was fine-tuned, on the best device that there is.

    Attributes:
        identity: what changes with the weights.
        labels: the names of classes; one alone is that of a number.
        source: the settings of the source that the model's rows came from; empty where that is not known.
        device: in words.

    Args:
        checkpoint: as of `load_weights`.
        precision: of matrix products.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: it is no model for classes of texts or for numbers.
    """

    def __init__(self, checkpoint: str, precision: Precision = "fp32") -> None:
        weights = load_weights(checkpoint)
        head = weights.config.head
        if head != "classification":
            raise ConfigError(
                f"{checkpoint} has a {head} head, and rows are labelled by models with a classification head; name a "
                "run of objective classification or regression"
            )
        self._accelerator, self._precision = for_any_shapes(), precision
        if precision not in self._accelerator.precisions:
            raise ConfigError(
                f"--precision {precision} is none of {self._accelerator.description}; leave it out"
            )
        meta: Tree = {} if weights.step is None else integrity.read_meta(weights.folder)
        self.source = next((manifest.source for manifest in manifests_of(meta)), {}) if meta else {}
        self.identity, self.labels = weights.identity(), weights.config.labels
        self.device = self._accelerator.description
        with weights.tokenizer_files() as folder:
            self._tokenizer = Tokenizer.load(folder)
        model = weights.model(frozenset({"classification"}))
        self._model = model.to(self._accelerator.device)
        length = _LONGEST
        if meta:
            phases = decode(Experiment, meta["config"]).resolved_phases()
            length = phase_of(phases, meta["step"] - 1).sequence_length
        self._objective = _objective(weights).build(self._tokenizer.vocabulary)
        self._spec = self._objective.pack_spec(min(length, model.max_sequence_length))

    def encode(self, rows: Sequence[TaskRow]) -> list[Encoded | str]:
        """Tokenises rows; where a text has no tokens, this is said in place of the row."""
        return task_rows.encode(rows, self._tokenizer, "classification")

    @torch.no_grad()
    def __call__(self, rows: Sequence[Encoded], cells: int) -> npt.NDArray[np.float32]:
        """Labels rows, in batches of rows of about the same length.

        Args:
            rows: N of them.
            cells: of a batch, padding included.

        Returns:
            float32 [N, C], the probabilities of classes; [N, 1], the number.
        """
        found = np.empty((len(rows), len(self.labels)), dtype=np.float32)
        lengths = np.minimum([len(row.tokens) for row in rows], self._spec.sequence_length)
        for numbers in batches(lengths, cells):
            examples = task_rows.pack([rows[number] for number in numbers], self._spec)
            width = int(parts.filled(examples, self._spec).max())
            arrays = self._objective.collate(examples, width)
            batch = self._accelerator.to_device(
                {name: torch.from_numpy(array) for name, array in arrays.items()}
            )
            with self._accelerator.autocast(self._precision):
                logits = logits_of(self._model, batch, self._objective.predicts)[:, 0].float()
            found[numbers] = (logits.softmax(-1) if len(self.labels) > 1 else logits).cpu().numpy()
        return found


def _objective(weights: Weights) -> Any:
    """What the model was fine-tuned by, for rows that have no labels: they are laid out as they were there."""
    settings = {name: value for name, value in weights.objective.items() if name != "kind"}
    if len(weights.config.labels) == 1:
        return decode(regression.Config, settings, "objective")
    config = decode(classification.Config, settings, "objective")
    return replace(
        config, soft=False, lm_weight=0.0, reads="last" if config.lm_weight else config.reads
    )
