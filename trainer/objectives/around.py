"""Tasks with something added to their loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from samestep.examples import Batch, Examples, PackSpec
from trainer.metrics.per_class import ClassReport
from trainer.objectives import Predictions, Task
from trainer.objectives.rows import Float32


class AroundTask(Task):
    """Takes batches and scores from a task's own objective; subclasses define the loss.

    Args:
        of: the task's own objective.
    """

    def __init__(self, of: Task) -> None:
        self.of = of
        self.predicts, self.denominator = of.predicts, of.denominator
        self.needs, self.columns = of.needs, of.columns
        self.score_names, self.mean_names = of.score_names, of.mean_names

    def pack_spec(self, sequence_length: int) -> PackSpec:
        return self.of.pack_spec(sequence_length)

    def predictions(self, sequence_length: int) -> int:
        return self.of.predictions(sequence_length)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        return self.of.collate(examples, sequence_length)

    def weights(self, batch: Mapping[str, object]) -> dict[str, float]:
        return self.of.weights(batch)

    def loss_of(self, means: Mapping[str, float]) -> float:
        return self.of.loss_of(means)

    def terms(self) -> Mapping[str, float]:
        return self.of.terms()

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return self.of.scores(predictions)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        return self.of.row_predictions(predictions)

    def class_report(self, predictions: Predictions) -> ClassReport | None:
        return self.of.class_report(predictions)

    def combined(self, outputs: Sequence[Float32]) -> Float32:
        return self.of.combined(outputs)
