"""Texts of a row that a model embeds apart: what `cosine` and `contrastive` share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from trainer.accelerators.kernels import without_autocast
from trainer.models.inputs import Inputs
from trainer.models.pooling import ROLES, Pool, Similarity, TextPool, pool
from trainer.objectives import ObjectiveConfig, Tensors
from trainer.objectives.rows import Float32
from trainer.objectives.task_rows import RowTask, single_labels


@dataclass(frozen=True)
class EmbeddingConfig(ObjectiveConfig):
    """Settings of an objective that embeds texts; `search`, `embed` and exports follow them.

    null is the value of the weights in init_from: a run with such an objective, or a folder of
    sentence-transformers. Elsewhere, it is the mean, cosines, and no prompts.

    Attributes:
        pool: how hidden states become an embedding: mean, first, last, max or weighted.
        normalize: whether embeddings have length 1. null: they do if cosines compare them.
        prompts: what the dataset's texts begin with, by role: query (first texts), document (all
            others), default (both, where one has none). Training adds nothing to the texts.
        max_length: maximum number of tokens of a text in use, special ones included; null is the
            model's. In training, `data.sequence_length` limits all texts of a row together.
    """

    embeds = True
    is_sparse = False  # whether logits are pooled, as in SPLADE, instead of hidden states
    pool: Pool | None = None
    normalize: bool | None = None
    prompts: dict[str, str] | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if unknown := sorted({*(self.prompts or {})} - {*ROLES}):
            raise ConfigError(
                f"prompts has the role {unknown[0]!r}. Use {', '.join(ROLES)}, such as "
                "prompts.query='query: '."
            )
        if self.max_length is not None and self.max_length < 3:
            raise ConfigError(
                f"max_length is {self.max_length}. Use 3 or more (with [CLS] and [SEP]), or null."
            )

    @property
    def compares(self) -> Similarity:
        """How two embeddings are compared."""
        return "cosine"


class SentencePairs(RowTask):
    """A task whose rows are T texts; their embeddings are compared (Reimers & Gurevych 2019).

    All are in one row, as packed sequences, [CLS] first text [SEP] [CLS] second text [SEP] ...,
    which do not see each other. To the rows of `RowTask` it adds:
        labels: float32 [B], the number of the row, or the index of its class.
        weights: float32 [B], the weight of the example.

    An embedding is pooled from the hidden states of a sequence, [CLS] and [SEP] included.

    Attributes:
        texts: T, the number of texts of each row.
    """

    config: EmbeddingConfig
    texts = 2
    predicts = "embedding"
    needs = frozenset({"embedding"})

    def __init__(self, config: ObjectiveConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary, "first")
        # [SEP] of a text and [CLS] of the next one.
        self._parts = replace(self._parts, between=2)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.lay_out(examples, sequence_length)
        texts = np.bincount(examples.row, minlength=examples.key.size)
        if (texts != self.texts).any():
            wrong = int(texts[texts != self.texts][0])
            raise ConfigError(
                f"a row of the dataset has {wrong} text{'s' * (wrong > 1)}, and embeddings of "
                f"{self.texts} texts are compared. Use a source with as many."
            )
        # The [CLS] of each text: [B, T]; a text reaches up to the next one's.
        first = examples.column.reshape(-1, self.texts) - 1
        place = np.arange(sequence_length)
        used = np.greater(batch["segments"], 0)
        # Texts that begin at 0, 4 and 9 have the positions 0-3, 4-8 and the rest: their numbers
        # count the later texts that have begun.
        number = (place >= first[:, 1:, None]).sum(axis=1)
        tokens = batch["tokens"].astype(np.int32)
        np.put_along_axis(tokens, first, self._rows.begin, axis=1)
        start = np.take_along_axis(first, number, axis=1)
        return {
            "tokens": tokens,
            "segments": (used * (1 + number)).astype(np.int32),
            "positions": (used * (place - start)).astype(np.int32),
            "labels": self.labels(examples),
            "weights": examples.weight,
        }

    def labels(self, examples: Examples) -> Float32:
        """The number of each row, or the index of its class: float32 [B]."""
        return single_labels(examples).astype(np.float32)

    def embed(self, model: nn.Module, batch: Tensors) -> Tensor:
        """The embeddings of the texts of each row: float32 [B, T, D]."""
        hidden = model(Inputs.of(batch), frozenset({"embedding"}))["embedding"]
        return self.pool_texts(hidden, batch, self.config.pool)

    def pool_texts(self, states: Tensor, batch: Tensors, how: TextPool | None) -> Tensor:
        """The embeddings of the texts in each row's states: [B, S, D] -> float32 [B, T, D]."""
        segments = batch["segments"][:, None, :]
        number = torch.arange(1, self.texts + 1, device=segments.device)[:, None]
        # Under autocast the mean, a matrix product, would have 8 bits.
        with without_autocast(states.device):
            return pool(states, segments == number, how or "mean")

    def comparable(self, embedded: Tensor) -> Tensor:
        """Embeddings [..., D] as vectors whose products are their similarities."""
        return F.normalize(embedded, dim=-1) if self.config.compares == "cosine" else embedded

    def similarities(self, pairs: Tensor) -> Tensor:
        """The similarity of the first two embeddings of each row: [B, T, D] -> [B]."""
        if self.config.compares == "cosine":
            return torch.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=-1)
        return (pairs[:, 0] * pairs[:, 1]).sum(-1)
