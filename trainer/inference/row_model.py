"""A fine-tuned model that reads rows of its task as in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data_pipeline.building import task_rows
from data_pipeline.building.task_rows import Encoded
from data_pipeline.packing.task_rows import filled
from samestep.config import Tree, decode
from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from trainer.accelerators import Precision
from trainer.accelerators.detect import for_any_shapes
from trainer.checkpoint.meta import read_meta
from trainer.models import Model, Outputs
from trainer.models.text_inputs import batches
from trainer.objectives.kinds import classification, question_answering, regression, tagging
from trainer.objectives.rows import logits as logits_of
from trainer.objectives.task_rows import PairTask, Pooled
from trainer.publish.model_card import manifests_of
from trainer.training.experiment import Experiment
from trainer.training.phases import phase_of
from trainer.training.weights.loading import Weights

HEADS = ("classification", "tagging", "question_answering")
_LONGEST = 512  # tokens of a row, for a checkpoint that does not store a sequence length


class RowLogits(NamedTuple):
    """The logits of a batch of rows.

    Attributes:
        numbers: int64 [B], the rows.
        examples: N examples, one or several windows for each row.
        logits: fp32, on the host: [N, C] of a classification head, else [N, S, C].
    """

    numbers: npt.NDArray[np.int64]
    examples: Examples
    logits: Tensor


class RowModel:
    """A fine-tuned model on the best device available.

    Attributes:
        labels: names of the classes or tags; a single name for a regression model.
        source: settings of the source of the model's training rows; empty where unknown.
        tokenizer: of the model.
        device: description of the device.
        objective: of the fine-tuning, for rows without labels.
        spec: how rows become sequences.

    Args:
        weights: of a model with one of `HEADS`.
        precision: of matrix products.
        model: of the weights, on the device; None loads it.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: the device does not support the precision.
    """

    def __init__(
        self, weights: Weights, precision: Precision = "fp32", model: Model | None = None
    ) -> None:
        self._accelerator, self._precision = for_any_shapes(), precision
        self.device = self._accelerator.description
        # Before the model is loaded, which may take minutes.
        if precision not in self._accelerator.precisions:
            raise ConfigError(
                f"--precision {precision} is not supported on {self.device}. Use fp32."
            )
        self.labels, self.head = weights.config.labels, weights.config.head
        self.tokenizer = weights.load_tokenizer()
        model = model or weights.model(frozenset({self.head}))
        self._model = model.to(self._accelerator.device)
        self.source: Tree = {}
        length = _LONGEST
        if weights.step is not None:  # a checkpoint of a run, not of Hugging Face
            meta = read_meta(weights.folder)
            self.source = next((manifest.source for manifest in manifests_of(meta)), {})
            # Rows are cut where the last step of training cut them.
            phases = decode(Experiment, meta["config"]).resolved_phases()
            length = phase_of(phases, meta["step"] - 1).sequence_length
        length = min(length, model.max_sequence_length)
        self.objective = _objective(weights, model.offers, self.tokenizer.vocabulary, length)
        self.spec = self.objective.pack_spec(length)

    @torch.no_grad()
    def batches(self, rows: Sequence[Encoded], batch_tokens: int) -> Iterator[RowLogits]:
        """Runs the model on rows, in batches of similar length.

        Args:
            batch_tokens: positions of a batch, padding included.
        """
        # Batches do not depend on the rows of other calls, so a resumed file has the same bytes.
        lengths = self._positions(np.array([len(row.tokens) for row in rows], dtype=np.int64))
        for numbers in batches(lengths, batch_tokens):
            examples = task_rows.pack([rows[number] for number in numbers], self.spec)
            width = self.spec.sequence_length
            if self.spec.positions == width:
                # No wider than the longest row: in batches of similar length, little is padding.
                width = int(filled(examples, self.spec).max())
            arrays = self.objective.collate(examples, width)
            batch = self._accelerator.to_device(
                {name: torch.from_numpy(array) for name, array in arrays.items()}
            )
            with self._accelerator.autocast(self._precision):
                if isinstance(self.objective, PairTask):
                    logits = self.objective.row_outputs(self._model, batch)
                else:
                    logits = logits_of(self._model, batch, self.head)
            yield RowLogits(numbers, examples, logits.float().cpu())

    def _positions(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """About how many positions each row takes, by its number of tokens: int64 [N]."""
        length, parts = self.spec.sequence_length, self.spec.parts
        assert parts is not None
        if self.spec.positions > length:  # several sequences, of the whole length
            return np.full_like(tokens, self.spec.positions)
        # With a length of 8 and a stride of 2, a row of 11 tokens has 1 + 2 windows of 8.
        stride = parts.stride if parts.layout == "windows" else None
        windows = 1 if stride is None else 1 + -(-np.maximum(tokens - length, 0) // stride)
        positions: npt.NDArray[np.int64] = np.minimum(tokens, length) * windows
        return positions


def _objective(weights: Weights, offers: Outputs, vocabulary: Vocabulary, length: int) -> Any:
    """The objective of the model's fine-tuning, adapted to rows without labels."""
    settings = {name: value for name, value in weights.objective.items() if name != "kind"}
    if weights.config.head == "tagging":
        return decode(tagging.Config, settings, "objective").build(vocabulary)
    if weights.config.head == "question_answering":
        # Windows begin `stride` tokens apart, and each needs room for as many behind the question.
        if not settings and length < 2 * question_answering.Config.stride:
            # A Hugging Face folder stores no windows. With 32 positions, a question and a stride of
            # 8 tokens leave room for three special tokens and 13 tokens of text.
            settings = {"stride": max(1, length // 4), "question_length": max(1, length // 4)}
        return decode(question_answering.Config, settings, "objective").build(vocabulary)
    if len(weights.config.labels) == 1:
        if weights.objective.get("kind") == "ranking":  # a passage's score is a number
            settings = {"reads": settings.get("reads")}
        config: Any = decode(regression.Config, settings, "objective")
    else:
        own = decode(classification.Config, settings, "objective")
        # An auxiliary language modeling loss needs no labels but changes where the head reads.
        reads = "last" if own.lm_weight else own.reads
        config = replace(own, soft=False, lm_weight=0.0, reads=reads)
    objective = config.build(vocabulary)
    # Where the model's head can read: offers name it as "first_position" or "last_position".
    offered = [each for each in get_args(Pooled) if f"{each}_position" in offers]
    if objective.pooled in offered:
        return objective
    # A checkpoint of Hugging Face names no position, and a decoder's tokenizer may have [CLS].
    return replace(config, reads=offered[0]).build(vocabulary)
