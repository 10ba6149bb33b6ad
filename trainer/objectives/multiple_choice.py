"""Which of several texts goes with a first one (SWAG, RACE, COPA), as in Devlin et al. 2019, section 4.4.

Each of the texts gets a score in a sequence of its own, behind the first text; the scores of a row are the logits of
one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Parts, Vocabulary
from trainer.metrics import check_names
from trainer.metrics import labels as metrics
from trainer.models import Inputs, Outputs
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task
from trainer.objectives.task_rows import (
    Cell,
    TaskRows,
    class_loss,
    class_predictions,
    count_examples,
    labelled,
    reads_for,
    single_labels,
)
from trainer.tasks import TASKS


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Multiple choice. `data.sequence_length` is that of each choice.

    Attributes:
        choices: of each row, as many as it has texts behind the first.
        metrics: that the held-out split is scored with: accuracy.
        reads: the cell of a sequence that is scored: for encoders the `first`, that of [CLS], for decoders the `last`.
            null goes by the tokenizer: the first for BERT's and RoBERTa's, which a GPT may have, too, else the last.
    """

    choices: int = 4
    metrics: tuple[str, ...] = ("accuracy",)
    reads: Cell | None = None

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["multiple_choice"].metrics)
        if self.choices < 2:
            raise ConfigError(f"choices is {self.choices}; there must be at least 2 to choose from")

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return reads_for(missing, offers)

    def build(self, vocabulary: Vocabulary) -> Task:
        return MultipleChoice(self, vocabulary)


class MultipleChoice(Task):
    """The multiple-choice objective; see `trainer.objectives.Task`.

    To the rows of `TaskRows`, k sequences of S cells side by side, it adds for B examples:
        predicted: int64 [B, k], the cell of each that is read: that of [CLS], or for a decoder its last with a token.
        labels: int64 [B], the right choice.
        weights: float32 [B], the weight of the example.
    The model gets each sequence as a row of its own; so `dropout_key` is int32 [B, k].

    The outputs are logits, float32 [B, k].

    Raises:
        ConfigError: as for `TaskRows`.
    """

    predicts = "multiple_choice"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config = config
        self._rows = TaskRows(vocabulary, config.reads)
        self.needs = frozenset({self.predicts, f"{self._rows.reads}_position"})

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """A sequence for each choice, behind the first text."""
        parts = Parts("multiple_choice", between=self._rows.between, choices=self.config.choices)
        return self._rows.pack_spec(sequence_length, parts)

    def predictions(self, sequence_length: int) -> int:
        """One for each choice."""
        return self.config.choices

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the texts out; see the class for the arrays."""
        batch = self._rows.lay_out(examples, sequence_length, self.config.choices)
        return {
            **batch,
            "predicted": self._rows.read_cells(batch, self.config.choices),
            "labels": single_labels(examples).astype(np.int64),
            "weights": examples.weight,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of examples that count."""
        return count_examples(batch)

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Cross-entropy in float32, over the step's number of examples, totals["examples"]."""
        count = batch["labels"].shape[0] * self.config.choices
        key = batch.get("dropout_key")
        sequences = replace(
            Inputs.of(batch).map(lambda column: column.view(count, -1)),
            dropout_key=None if key is None else key.view(count),
        )
        found = model(sequences, frozenset({self.predicts}))[self.predicts]
        logits = found.view(-1, self.config.choices)
        return class_loss(logits, batch["labels"], batch["weights"], totals["examples"])

    @property
    def score_names(self) -> tuple[str, ...]:
        """The metrics."""
        return self.config.metrics

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The metrics."""
        scored = labelled(predictions)
        return metrics.scores(
            self.config.metrics, scored.outputs.argmax(-1), scored.labels.astype(int)
        )

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """Label and prediction, from 0, and the probability of each choice."""
        return class_predictions(predictions, range(self.config.choices))
