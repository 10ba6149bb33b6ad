"""A number for a text or a pair of texts, as the similarity of two sentences in GLUE's STS-B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, Parts, Vocabulary
from trainer.metrics import check_names
from trainer.metrics import labels as metrics
from trainer.models import Outputs
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task
from trainer.objectives.rows import logits
from trainer.objectives.task_rows import (
    Cell,
    TaskRows,
    count_examples,
    labelled,
    labels_and_outputs,
    reads_for,
    single_labels,
)
from trainer.tasks import TASKS


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Regression: a number for each row.

    Attributes:
        metrics: that the held-out split is scored with: pearson, spearman (correlations).
        reads: the cell of a sequence that is scored: for encoders the `first`, that of [CLS], for decoders the `last`.
            null goes by the tokenizer: the first for BERT's and RoBERTa's, which a GPT may have, too, else the last.
    """

    metrics: tuple[str, ...] = ("pearson", "spearman")
    reads: Cell | None = None

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["regression"].metrics)

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return reads_for(missing, offers)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Regression(self, vocabulary)


class Regression(Task):
    """The regression objective; see `trainer.objectives.Task`.

    To the rows of `TaskRows` it adds, for B examples:
        predicted: int64 [B, 1], the cell that is read: that of [CLS], or for a decoder the last one with a token.
        labels: float32 [B], the number.
        weights: float32 [B], the weight of the example.

    The outputs are what the model says, float32 [B, 1].

    Raises:
        ConfigError: as for `TaskRows`.
    """

    predicts = "classification"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config = config
        self._rows = TaskRows(vocabulary, config.reads)
        # A head with a single class gives a number.
        self.needs = frozenset({self.predicts, f"{self._rows.reads}_position"})

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """All texts of a row in one sequence."""
        return self._rows.pack_spec(
            sequence_length, Parts("regression", between=self._rows.between)
        )

    def predictions(self, sequence_length: int) -> int:
        """One."""
        return 1

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the texts out; see the class for the arrays."""
        batch = self._rows.lay_out(examples, sequence_length)
        return {
            **batch,
            "predicted": self._rows.read_cells(batch),
            "labels": single_labels(examples),
            "weights": examples.weight,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of examples that count."""
        return count_examples(batch)

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Squared error in float32, over the step's number of examples, totals["examples"]."""
        outputs = logits(model, batch, self.predicts)[:, 0].float()
        weights = batch["weights"]
        # A head with more outputs would be compared with each label once for each of them.
        assert outputs.shape[-1] == 1, "the model's head has several outputs"
        error = ((outputs[:, 0] - batch["labels"]).square() * weights).sum()
        return Loss(
            error / totals["examples"], {"loss": (error.detach(), weights.sum())}, outputs.detach()
        )

    @property
    def score_names(self) -> tuple[str, ...]:
        """The metrics."""
        return self.config.metrics

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The metrics."""
        scored = labelled(predictions)
        return metrics.scores(
            self.config.metrics, scored.outputs[:, 0].astype(np.float64), scored.labels
        )

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The number that is right, as label, and the predicted one."""
        return (
            {"label": label, "prediction": float(output[0])}
            for label, output in labels_and_outputs(predictions)
        )
