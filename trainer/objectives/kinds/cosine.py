"""Similarity of two texts as the cosine of their embeddings (Reimers & Gurevych 2019: STS-B)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import check_names
from trainer.objectives import Loss, Predictions, Task, Tensors
from trainer.objectives.sentence_pairs import EmbeddingConfig, SentencePairs
from trainer.objectives.task_rows import number_predictions, number_scores


@dataclass(frozen=True)
class Config(EmbeddingConfig):
    """Cosine similarity, from rows of kind `regression`. A row's length counts both texts.

    Attributes:
        highest: the number that stands for equal texts: 5 in STS-B. 0 stands for a cosine of 0.
        metrics: scores of the held-out split: pearson, spearman.
    """

    highest: float = 5.0
    metrics: tuple[str, ...] = ("spearman", "pearson")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.metrics, TASKS["regression"].metrics)
        if not self.highest > 0:
            raise ConfigError(
                f"highest is {self.highest}. Use a number above 0, such as 5 for STS-B."
            )

    def build(self, vocabulary: Vocabulary) -> Task:
        return Cosine(self, vocabulary)


class Cosine(SentencePairs):
    """The squared distance of cosines from the labels; the outputs are cosines, [B, 1]."""

    kind = "regression"
    config: Config

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Squared error in float32, over totals["examples"]."""
        found = self.similarities(self.embed(model, batch))
        weights = batch["weights"]
        error = (found - batch["labels"] / self.config.highest).square()
        error = (error * weights).sum()
        means = {"loss": (error.detach(), weights.sum())}
        return Loss(error / totals["examples"], means, found.detach()[:, None])

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return number_scores(self.score_names, predictions)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The label and the cosine."""
        return number_predictions(predictions)
