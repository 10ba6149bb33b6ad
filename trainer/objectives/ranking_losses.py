"""Losses of a query's passages: pure functions from scores and labels [B, M] to losses [B].

Column 0 is the positive passage, the others are negatives. Labels are a teacher's scores, or 1 for
the positive and 0 for the negatives. The loss of a batch is the mean over its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError
from samestep.examples import Examples
from trainer.objectives.rows import Float32

TeacherLoss: TypeAlias = Literal["mse", "margin_mse", "kl"]
"""Losses that compare scores with a teacher's."""
PairWeights: TypeAlias = Literal["none", "lambda_rank", "ndcg_loss2++"]
TEACHER_LOSSES = get_args(TeacherLoss)

_MU = 10.0  # of NDCG-Loss2 beside LambdaRank, as in the paper's experiments


def binary(scores: Tensor, labels: Tensor, positive_weight: float = 1.0) -> Tensor:
    """Cross-entropy of sigmoid(score), mean over passages (Nogueira & Cho 2019, equation 1).

    Args:
        positive_weight: factor of the term of the label 1.
    """
    weight = scores.new_full((), positive_weight)
    nll = F.binary_cross_entropy_with_logits(scores, labels, reduction="none", pos_weight=weight)
    return nll.mean(1)


def softmax(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the positive among the row's passages (Gao et al. 2021, "LCE").

    The labels are not used.
    """
    target = torch.zeros(len(labels), dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores, target, reduction="none")


def listwise(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of both top-one distributions, softmax(scores) and softmax(labels).

    Cao et al. 2007, "ListNet", section 5. With the labels 1 and 0, the positive's probability is
    e / (e + N) for N negatives: 0.28 for 7.
    """
    return F.cross_entropy(scores, labels.softmax(1), reduction="none")


def pairwise(scores: Tensor, labels: Tensor, pair_weights: PairWeights) -> Tensor:
    """log2(1 + exp(s_j - s_i)) w_ij, mean over the pairs with label_i > label_j.

    With w = 1, RankNet (Burges 2010, section 2). For nDCG, with G_i = (2^label_i - 1) / max DCG,
    the discount D(r) = log2(1 + r) and the rank r_i of score i:

        lambda_rank   |G_i - G_j| |1 / D(r_i) - 1 / D(r_j)|, the change of nDCG if both passages
                      changed places (Burges 2010, section 4)
        ndcg_loss2++  that, and 10 |G_i - G_j| |1 / D(d) - 1 / D(d + 1)|, with d = |r_i - r_j|
                      (Wang et al. 2018, "LambdaLoss")

    Passages of equal score are ranked in their order.
    """
    # [B, M, M]: labels 1 0 0 have the pairs (0, 1) and (0, 2).
    is_pair = labels[:, :, None] > labels[:, None, :]
    loss = F.softplus(scores[:, None, :] - scores[:, :, None]) / math.log(2)
    if pair_weights != "none":
        loss = loss * _ndcg_weights(scores.detach(), labels, pair_weights)
    # A row whose passages have equal labels has no pair, and no loss.
    return (loss * is_pair).sum((1, 2)) / is_pair.sum((1, 2)).clamp(min=1)


def _ndcg_weights(scores: Tensor, labels: Tensor, pair_weights: PairWeights) -> Tensor:
    """The weight of each pair, [B, M, M]."""
    count = scores.shape[1]
    places = torch.arange(1, count + 1, device=scores.device)
    # 1, 1.58 and 2 for the places 1, 2 and 3.
    discount = torch.log2(1.0 + places)
    gain = 2**labels - 1
    # Of all passages with the label 0, it is 0, and the clamp keeps the gains 0 / 0 from NaN.
    best = (gain.sort(descending=True).values / discount).sum(1, keepdim=True)
    gain = gain / best.clamp(min=1e-10)
    # Ranks from 0: scores 0.2 0.9 0.5 have the order 1 2 0, and the ranks 2 0 1.
    rank = scores.argsort(descending=True, stable=True).argsort()
    inverse = 1 / discount
    own = inverse[rank]
    weights = (own[:, :, None] - own[:, None, :]).abs()
    if pair_weights == "ndcg_loss2++":
        apart = (rank[:, :, None] - rank[:, None, :]).abs()
        step = F.pad(inverse[:-1] - inverse[1:], (1, 0))  # 0 ranks apart: the passage itself
        weights = weights + _MU * step[apart]
    return weights * (gain[:, :, None] - gain[:, None, :]).abs()


def mse(scores: Tensor, labels: Tensor) -> Tensor:
    """Squared distance from the teacher's scores, mean over passages."""
    return (scores - labels).square().mean(1)


def margin_mse(scores: Tensor, labels: Tensor) -> Tensor:
    """Squared distance from the teacher's margins between the positive and each negative.

    Hofstätter et al. 2021, "Improving Efficient Neural Ranking Models with Cross-Architecture
    Knowledge Distillation", section 3; mean over negatives.
    """
    margins, taught = (each[:, :1] - each[:, 1:] for each in (scores, labels))
    return (margins - taught).square().mean(1)


def kl(scores: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 times the divergence of softmax(scores / T) from softmax(labels / T).

    Hinton et al. 2015, section 2; for rankings, Lin et al. 2020, "TCT-ColBERT".
    """
    own, taught = (F.log_softmax(each / temperature, 1) for each in (scores, labels))
    return F.kl_div(own, taught, reduction="none", log_target=True).sum(1) * temperature**2


@dataclass(frozen=True)
class Distill:
    """A term of embeddings: the similarities of a row's passages, beside a teacher's scores.

    Attributes:
        loss: mse, margin_mse or kl, which needs no teacher of the same scale.
        weight: factor of the term.
        temperature: of kl: divides the teacher's scores; similarities have the objective's.
    """

    loss: TeacherLoss = "kl"
    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weight", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"distill.{name} is {getattr(self, name)}. Use more than 0.")

    def scores(self, examples: Examples) -> Float32:
        """The teacher's scores of each row's passages: float32 [B, M]."""
        assert examples.labels is not None, "the examples are no rows of a task"
        scores: Float32 = examples.labels.values.reshape(examples.key.size, -1)
        return scores

    def __call__(self, similarities: Tensor, scores: Tensor, temperature: float) -> Tensor:
        """The weighted loss of each row, [B].

        Args:
            similarities: [B, M], of the query and each passage.
            scores: [B, M], the teacher's.
            temperature: divides the similarities in kl.
        """
        if self.loss == "kl":
            return self.weight * kl(similarities / temperature, scores / self.temperature)
        return self.weight * PLAIN[self.loss](similarities, scores)


PLAIN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax,
    "listwise": listwise,
    "mse": mse,
    "margin_mse": margin_mse,
}
"""The losses without settings."""
