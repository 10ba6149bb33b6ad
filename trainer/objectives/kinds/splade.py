"""SPLADE: sparse embeddings of texts over the vocabulary (Formal et al. 2021, arXiv 2109.10086).

An embedding is pooled from the logits of the masked-LM head (`trainer.models.pooling.splade`), and
dot products compare embeddings. So a text matches by its own words and by words that the model adds
to it, and an inverted index can search. The loss is the one of `contrastive` plus a regularizer,
FLOPS (Paria et al. 2020, arXiv 2004.05665), which makes embeddings sparse:

    sum_j (mean_i |e_ij|)^2    over vocabulary entries j and the texts i of the global batch,

for queries and for passages, with weights that rise over the first steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from trainer.models.pooling import Similarity
from trainer.objectives import Loss, Task, Tensors
from trainer.objectives.kinds import contrastive

_VALUES = ("flops_query", "flops_passage", "active_query", "active_passage")
"""Metrics, and the first columns of `over_batch`."""


@dataclass(frozen=True)
class Config(contrastive.Config):
    """Sparse embeddings over the vocabulary, from the rows of `contrastive`.

    Attributes:
        pool: log(1 + relu(logit)) of each vocabulary entry, its maximum over the tokens of a text.
        normalize: false: embeddings have any length.
        similarity: dot products compare them.
        margin: null, as it is for cosines.
        widths: empty, as each number stands for a word.
        guide: null.
        learn_temperature: false.
        flops_query: weight of the FLOPS regularizer of queries, the first texts of rows; a higher
            one makes their embeddings sparser.
        flops_passage: the same of passages, all other texts.
        flops_warmup_steps: both weights rise with the square of the step's number up to this one.
    """

    is_sparse = True
    pool: Literal["splade"] = "splade"  # type: ignore[assignment]  # no pooling of hidden states
    normalize: bool | None = False
    similarity: Similarity | None = "dot"
    temperature: float = 1.0
    flops_query: float = 5e-5
    flops_passage: float = 3e-5
    flops_warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if self.margin is not None:
            raise ConfigError("margin is a cosine, and SPLADE compares by products. Leave it out.")
        super().__post_init__()
        if self.normalize or self.similarity != "dot":
            raise ConfigError(
                f"normalize is {self.normalize} and similarity {self.similarity}, and an inverted "
                "index compares by dot products. Leave both out."
            )
        if self.widths:
            raise ConfigError(
                f"widths are {list(self.widths)}, and the numbers of sparse embeddings stand for "
                "the words of the vocabulary. Leave widths out."
            )
        if self.guide is not None or self.learn_temperature:
            name = "learn_temperature" if self.guide is None else "guide"
            raise ConfigError(f"{name} is set, which only objective.kind=contrastive has.")
        for name in ("flops_query", "flops_passage", "flops_warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use 0 or more.")

    def build(self, vocabulary: Vocabulary) -> Task:
        return Splade(self, vocabulary)


class Splade(contrastive.Contrastive):
    """Contrastive learning of sparse embeddings, with the FLOPS regularizer.

    Logged losses and evaluations are without the regularizer. Metrics beside them: `flops_query`
    and `flops_passage`, its values of the global batch before they are weighted, and `active_query`
    and `active_passage`, the mean number of an embedding's numbers above 0.
    """

    config: Config
    predicts = "tokens"
    needs = frozenset({"tokens"})
    mean_names = (*contrastive.Contrastive.mean_names, *_VALUES)

    def over_batch(self, table: Tensor) -> Tensor:
        """The columns of `contrastive`, the regularizer's gradient included, after `_VALUES`."""
        found = super().over_batch(table)
        columns = self.split(table)
        pairs, anchor, weights = columns.pairs, columns.anchor, columns.weights
        # [T, V]: of each text of a row, the mean over the rows that do not only pad the batch.
        shares = weights / weights.sum().clamp(min=1)
        # Numbers 1 and 3 of a vocabulary entry in two rows have the mean 2, and its square is 4.
        means = (shares @ pairs.flatten(1)).view(pairs.shape[1:])
        query, passage = means[:1], means[1:].mean(0, keepdim=True)
        # d/de of sum_j mean_j^2 is 2 mean_j / (number of texts): the mean of a row's passages has
        # shares of 1 / (T - 1). `loss` divides by the number of anchors, which this takes back.
        factors = self._weights(table.device) * torch.where(anchor.sum() > 0, anchor.sum(), 1)
        slope = torch.cat(
            (factors[0] * query, (factors[1] * passage / (len(means) - 1)).expand_as(means[1:]))
        )
        own = found[:, : slope.numel()].view(len(found), *slope.shape)
        own.addcmul_(shares[:, None, None], slope, value=2)
        # Of [0, 0.7, 0, 1.2], 2.
        active = (pairs > 0).sum(-1).float()
        values = torch.stack((query.square().sum(), passage.square().sum())).expand(len(table), 2)
        return torch.cat((values, active[:, :1], active[:, 1:].mean(1, keepdim=True), found), 1)

    def _weights(self, device: torch.device) -> Tensor:
        """The weights of queries and passages in this step, [2]."""
        config, warmup = self.config, self.config.flops_warmup_steps
        # As the learning rate, the first step of a warm-up has 0. With 4 warm-up steps, the shares
        # are 0, 1/16, 1/4, 9/16, 1, 1, ...
        share = 1.0
        if self.step is not None and self.step < warmup:
            share = (self.step / warmup) ** 2
        return torch.tensor((config.flops_query * share, config.flops_passage * share)).to(device)

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The mean over anchors, with the metrics of the regularizer."""
        columns, weights = batch["over_batch"], batch["weights"]
        first = len(_VALUES)
        found = super().loss(model, {**batch, "over_batch": columns[:, first:]}, totals)
        count, values = weights.sum(), (columns[:, :first] * weights[:, None]).sum(0)
        means = {name: (value, count) for name, value in zip(_VALUES, values, strict=True)}
        return replace(found, metrics={**found.metrics, **means})
