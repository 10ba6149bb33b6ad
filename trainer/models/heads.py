"""Output heads.

All take the hidden states, the token embeddings, and keys for dropout, as some have it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.config import Activation, TransformerConfig
from trainer.models.dropout import dropout, split_key
from trainer.models.layers import activate
from trainer.models.norms import LayerNorm


class MaskedLMHead(nn.Module):
    """Predicts tokens: dense, activation, norm, then a product with the token embeddings or a
    matrix of its own.
    """

    def __init__(self, config: TransformerConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(config.width, config.width)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.decoder = (
            None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        )
        self.bias = nn.Parameter(self.dense.bias.new_zeros(config.vocab_size))

    def forward(
        self, hidden: Tensor, embedding: Tensor, _dropout_key: Tensor | None = None
    ) -> Tensor:
        """[B, P, D] -> logits [B, P, V].

        Embedding: [V, D], the token embeddings, used when the head is tied.
        """
        hidden = self.norm(activate(self.dense(hidden), self.activation))
        return F.linear(
            hidden, embedding if self.decoder is None else self.decoder.weight, self.bias
        )


class LanguageModelHead(nn.Module):
    """Predicts tokens by a product with the token embeddings, the hidden states scaled, or with a
    matrix of its own.
    """

    def __init__(self, config: TransformerConfig, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.decoder = (
            None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        )

    def forward(
        self, hidden: Tensor, embedding: Tensor, _dropout_key: Tensor | None = None
    ) -> Tensor:
        """[B, P, D] -> logits [B, P, V].

        Embedding: [V, D], the token embeddings, used when the head is tied.
        """
        if self.decoder is not None:
            logits: Tensor = self.decoder(hidden)
            return logits
        return F.linear(hidden if self.scale == 1 else hidden * self.scale, embedding)


class PooledHead(nn.Module):
    """Scores sequences by a cell of each: BERT's pooler (dense, tanh), dropout and a classifier.

    Args:
        config: shape and family.
        classes: C.
        dropout_first: whether there is dropout before the pooler, too (RoBERTa, T5).
    """

    def __init__(
        self, config: TransformerConfig, classes: int, dropout_first: bool = False
    ) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.dropout_first = dropout_first
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, classes)

    def forward(
        self, hidden: Tensor, _embedding: Tensor, dropout_key: Tensor | None = None
    ) -> Tensor:
        """[B, P, D] -> logits [B, P, C]; dropout_key: int32 [B], None means no dropout."""
        before, after = (None, None) if dropout_key is None else split_key(dropout_key, 2)
        if self.dropout_first:
            hidden = dropout(hidden, self.dropout, before)
        logits: Tensor = self.classifier(dropout(self.pooler(hidden).tanh(), self.dropout, after))
        return logits


class CellHead(nn.Module):
    """Scores each cell by itself: a classifier, after dropout if `drops`."""

    def __init__(
        self, config: TransformerConfig, classes: int, drops: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.dropout = config.dropout if drops else 0.0
        self.classifier = nn.Linear(config.width, classes, bias=bias)

    def forward(
        self, hidden: Tensor, _embedding: Tensor, dropout_key: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> logits [B, S, C]; dropout_key: int32 [B], None means no dropout."""
        logits: Tensor = self.classifier(dropout(hidden, self.dropout, dropout_key))
        return logits


class NextSentenceHead(nn.Module):
    """Says whether segment B is the text after A: BERT's pooler (dense, tanh) and a classifier."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, first: Tensor) -> Tensor:
        """The hidden states of the first tokens [B, D] -> logits [B, 2] of "follows" and "is from
        elsewhere".
        """
        logits: Tensor = self.classifier(self.pooler(first).tanh())
        return logits
