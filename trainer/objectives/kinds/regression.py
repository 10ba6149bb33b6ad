"""Regression: a number for a text or a pair, as the similarity of two sentences in GLUE's STS-B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from samestep.examples import Batch, Examples, Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import check_names
from trainer.objectives import Loss, Predictions, Task, Tensors
from trainer.objectives.task_rows import (
    PairConfig,
    PairTask,
    Pooled,
    number_predictions,
    number_scores,
    single_labels,
)


@dataclass(frozen=True)
class Config(PairConfig):
    """Regression: a number for each row.

    Attributes:
        both_orders: reads the two texts of a row in both orders, each in a sequence of its own,
            and adds the outputs (Radford et al. 2018, section 3.3).
        stride: cuts a text that is too long into windows, which start this many tokens apart, and
            averages their outputs; null truncates it.
        metrics: scores of the held-out split: pearson, spearman (correlations).
    """

    metrics: tuple[str, ...] = ("pearson", "spearman")
    reads: Pooled | None = None
    both_orders: bool = False
    stride: int | None = None

    def __post_init__(self) -> None:
        self.check_arrangement()
        check_names(self.metrics, TASKS["regression"].metrics)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Regression(self, vocabulary)


class Regression(PairTask):
    """The regression objective; see `PairTask`.

    The outputs are the predicted numbers, float32 [B, 1], from a classification head with one
    class.
    """

    kind = "regression"
    predicts = "classification"

    def targets(self, examples: Examples) -> Batch:
        return {"labels": single_labels(examples).copy()}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Squared error in float32, over totals["examples"]."""
        outputs = self.row_outputs(model, batch).float()
        weights = batch["weights"]
        assert outputs.shape[-1] == 1, "the model's head has several outputs"
        error = ((outputs[:, 0] - batch["labels"]).square() * weights).sum()
        means = {"loss": (error.detach(), weights.sum())}
        return Loss(error / totals["examples"], means, outputs.detach())

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return number_scores(self.score_names, predictions)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The label and the predicted number."""
        return number_predictions(predictions)
