"""Ranking of passages for a query by a cross-encoder, which reads both in one sequence.

As in Nogueira & Cho 2019, "Passage Re-ranking with BERT": [CLS] query [SEP] passage [SEP], and one
score from a classification head with one label. A row has a positive passage and N negatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from trainer.objectives import Loss, Predictions, Task, Tensors
from trainer.objectives.ranking_losses import (
    PLAIN,
    TEACHER_LOSSES,
    PairWeights,
    TeacherLoss,
    binary,
    kl,
    pairwise,
)
from trainer.objectives.rows import Float32, Int64
from trainer.objectives.task_rows import (
    Pooled,
    PooledConfig,
    PooledTask,
    labels_of,
    rows_with_outputs,
    scored_rows,
)

RankingLoss: TypeAlias = Literal["binary", "softmax", "listwise", "pairwise"] | TeacherLoss

_SCORES = ("accuracy", "mrr", "ndcg")
_RANGES: Mapping[str, tuple[float, float]] = {"binary": (0, 1), "pairwise": (0, 64)}
"""Labels that a loss is defined for: probabilities, and relevances r of gain 2^r - 1."""
_OF_LOSS = {"positive_weight": "binary", "pair_weights": "pairwise", "temperature": "kl"}


@dataclass(frozen=True)
class Config(PooledConfig):
    """Ranking, from rows of kind `retrieval`. `data.sequence_length` is of query and passage.

    Labels are a teacher's scores if the dataset has them, else 1 for the positive and 0 for each
    negative.

    Attributes:
        loss: binary (cross-entropy of each passage alone), softmax (of the positive among the row's
            passages), listwise (ListNet: of softmax(labels)), pairwise (RankNet and LambdaRank); or
            with a teacher's scores mse, margin_mse, kl.
        negatives: number of negative passages of a row.
        positive_weight: of binary: factor of the term of the positive passage.
        pair_weights: of pairwise: none, lambda_rank or ndcg_loss2++, by the change of nDCG.
        temperature: of kl: divides the scores of both models.
    """

    loss: RankingLoss = "binary"
    negatives: int = 1
    positive_weight: float = 1.0
    pair_weights: PairWeights = "lambda_rank"
    temperature: float = 1.0
    reads: Pooled | None = None

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise ConfigError(f"negatives is {self.negatives}. Use at least 1.")
        for name in ("positive_weight", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use a number above 0.")
        for name, loss in _OF_LOSS.items():
            if self.loss != loss and getattr(self, name) != getattr(Config, name):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, which is for loss {loss}, and loss is "
                    f"{self.loss}. Leave {name} out."
                )

    @property
    def needs_scores(self) -> str | None:
        return f"objective.loss={self.loss}" if self.loss in TEACHER_LOSSES else None

    def build(self, vocabulary: Vocabulary) -> Task:
        return Ranking(self, vocabulary)


class Ranking(PooledTask):
    """The ranking objective; see `PooledTask`, whose sequences are the row's M = 1 + N passages.

    The outputs are scores, float32 [B, M], of the positive first. Labels are float32 [B, M].
    """

    kind = "retrieval"
    predicts = "classification"
    mean_names = ("loss", "accuracy")

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.score_names = _SCORES
        is_bounded = config.loss != "pairwise" or config.pair_weights != "none"
        self._parts = replace(
            self._parts,
            choices=1 + config.negatives,
            arrangement="choices",
            negatives=config.negatives,
            score_range=_RANGES.get(config.loss) if is_bounded else None,
        )
        self._loss = (
            PLAIN.get(config.loss)
            or {
                "binary": partial(binary, positive_weight=config.positive_weight),
                "pairwise": partial(pairwise, pair_weights=config.pair_weights),
                "kl": partial(kl, temperature=config.temperature),
            }[config.loss]
        )

    def targets(self, examples: Examples) -> Batch:
        labels = labels_of(examples)
        assert (labels.count == self._parts.choices).all(), "a row has too few or many labels"
        values = labels.values.reshape(-1, self._parts.choices)
        return {"labels": values.copy()}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The mean over rows in float32, totals["examples"]."""
        scores = self.sequence_outputs(model, batch).float()
        assert scores.shape[-1] == 1, "the model's head has several outputs"
        scores, weights = scores[..., 0], batch["weights"]
        total = (self._loss(scores, batch["labels"]) * weights).sum()
        found = scores.detach()
        first = (found[:, 1:] < found[:, :1]).all(1) * weights
        means = {
            "loss": (total.detach(), weights.sum()),
            "accuracy": (first.sum(), weights.sum()),
        }
        return Loss(total / totals["examples"], means, found)

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """Of the positive's rank r: whether it is 1, 1 / r, and nDCG, which is 1 / log2(1 + r)."""
        rank = ranks(scored_rows(predictions).outputs)
        if not rank.size:
            return {}
        found = (rank == 1, 1 / rank, 1 / np.log2(1 + rank))
        return {name: float(each.mean()) for name, each in zip(_SCORES, found, strict=True)}

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The positive's rank, and the scores: its own, then the negatives' from the highest."""
        # The order of the negatives is a hash, from which no reader could tell their texts.
        for _, scores in rows_with_outputs(predictions):
            positive, *negatives = scores.tolist()
            rank = int(ranks(scores[None])[0])
            yield {"rank": rank, "scores": [positive, *sorted(negatives, reverse=True)]}


def ranks(scores: Float32) -> Int64:
    """The rank of the positive passage, column 0, from 1: float32 [B, M] -> [B].

    Negatives of an equal score come before it, so that constant scores are the worst ones.
    """
    # Not `>=`, which is false for NaN.
    found: Int64 = 1 + np.count_nonzero(~(scores[:, 1:] < scores[:, :1]), axis=1)
    return found
