"""Contrastive learning of sentence embeddings, with negatives from the whole global batch.

For each pair that belongs together, the second text should be closer to the first one than the
second texts of all other rows (Henderson et al. 2017; Gao et al. 2021, "SimCSE").

Other rows may be on other devices, or in other micro-batches. So all texts are embedded twice, as
in GradCache (Gao et al. 2021, arXiv 2101.06983): first without gradients, to compute the loss of
the global batch and its gradient with respect to each embedding; then with gradients, which
continue from there. Dropout masks are functions of the example, so both passes give the same
embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from trainer.objectives import Loss, ObjectiveConfig, OverBatch, Predictions, Task, Tensors
from trainer.objectives.sentence_pairs import SentencePairs, similarities
from trainer.objectives.task_rows import rows_with_outputs


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Contrastive learning, from rows of kind `classification` with two texts.

    Attributes:
        positive: index of the label whose pairs belong together: 0 for MNLI's entailment, 1 for
            MRPC's equivalent. The second texts of rows with other labels are negatives only.
        temperature: divides the cosines.
    """

    positive: int = 0
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}. Use a number above 0, such as 0.05."
            )
        if self.positive < 0:
            raise ConfigError(f"positive is {self.positive}. Use the index of a label, from 0.")

    def check_labels(self, labels: Sequence[str]) -> None:
        # Without a pair that belongs together, a run would train nothing.
        if self.positive >= len(labels):
            raise ConfigError(
                f"objective.positive is {self.positive}, and the dataset has the labels "
                f"{', '.join(labels)}. Use the index of one of them, 0 to {len(labels) - 1}."
            )

    def build(self, vocabulary: Vocabulary) -> Task:
        return Contrastive(self, vocabulary)


class Contrastive(SentencePairs, OverBatch):
    """Cross-entropy of the right text among all second texts of a global batch.

    The outputs are the cosines of the rows' own pairs, [B, 1].
    """

    kind = "classification"
    mean_names = ("loss", "accuracy")
    config: Config

    def weights(self, batch: Any) -> dict[str, float]:
        positive = batch["labels"] == self.config.positive
        return {self.denominator: float((batch["weights"] * positive).sum())}

    def summary(self, model: nn.Module, batch: Tensors) -> Tensor:
        """For each row both embeddings, whether it is an anchor, and its weight: [B, 2 D + 2]."""
        pairs = self.embed(model, batch)
        weights = batch["weights"]
        anchor = (batch["labels"] == self.config.positive) * weights
        return torch.cat((pairs.flatten(1), anchor[:, None], weights[:, None]), 1)

    def over_batch(self, table: Tensor) -> Tensor:
        """The gradient for both embeddings of each row, its loss and success: [N, 2 D + 2]."""
        with torch.enable_grad():
            pairs = table[:, :-2].detach().view(len(table), 2, -1).requires_grad_()
            anchor, weights = table[:, -2], table[:, -1]
            first, second = F.normalize(pairs[:, 0], dim=-1), F.normalize(pairs[:, 1], dim=-1)
            scores = first @ second.mT / self.config.temperature
            # Rows that only pad the batch are no candidates.
            scores = scores.masked_fill(weights == 0, float("-inf"))
            own = torch.arange(len(table), device=table.device)
            # A padding row has itself alone, so that its loss is a number.
            scores = torch.where(
                torch.eye(len(table), device=table.device) > 0,
                (first * second).sum(-1)[:, None] / self.config.temperature,
                scores,
            )
            nll = F.cross_entropy(scores, own, reduction="none") * anchor
            (slope,) = torch.autograd.grad(nll.sum(), pairs)
        correct = (scores.argmax(-1) == own) * anchor
        return torch.cat((slope.flatten(1), nll.detach()[:, None], correct[:, None]), 1)

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The mean over anchors, totals["examples"]; its value comes from the first pass."""
        pairs = self.embed(model, batch)
        slope, (nll, correct) = batch["over_batch"][:, :-2], batch["over_batch"][:, -2:].unbind(1)
        # Its gradient equals the loss's: sum_ij d loss / d e_ij * d e_ij.
        total = (pairs.flatten(1) * slope).sum() / totals["examples"]
        count = ((batch["labels"] == self.config.positive) * batch["weights"]).sum()
        means = {"loss": (nll.sum(), count), "accuracy": (correct.sum(), count)}
        return Loss(total, means, similarities(pairs.detach())[:, None])

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return {}

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The index of the label and the cosine."""
        for row, output in rows_with_outputs(predictions):
            yield {"label": row.label, "prediction": float(output[0])}
