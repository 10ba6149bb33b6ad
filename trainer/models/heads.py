"""Output heads: called as head(hidden, token_embeddings, dropout_key), though not all use each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import product_multiple
from trainer.models import scores_of
from trainer.models.config import Activation, Pooling, TransformerConfig
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.layer import activate
from trainer.models.token_scores import Target, score_hidden

Factors: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [B, P, E], output matrix [V, E] and bias [V], whose product are logits."""

_POOLINGS: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
}


def _decoder(config: TransformerConfig) -> nn.Linear | None:
    """The output matrix; None if it is shared with the token embeddings."""
    return None if config.tied else nn.Linear(config.embedding_width, config.vocab_size, bias=False)


class EmbeddingHead(nn.Module):
    """Hidden states as they are, for the embedding of a text: their mean."""

    def forward(self, hidden: Tensor, _embedding: Tensor, _key: Tensor | None = None) -> Tensor:
        return hidden


class VocabularyHead(nn.Module, ABC):
    """Predicts tokens: hidden states times an output matrix, plus a bias."""

    def forward(
        self, hidden: Tensor, embedding: Tensor, *columns: Any, target: Target | None = None
    ) -> Tensor:
        """[B, P, D], token embeddings [V, E] -> logits [B, P, V], or their scores for a target."""
        hidden, matrix, bias = self.factors(hidden, embedding, *columns)
        if target is None:
            return F.linear(hidden, matrix, bias)
        if more := -len(matrix) % product_multiple(matrix.device):
            # Tokens are added that have no probability.
            bias = matrix.new_zeros(len(matrix)) if bias is None else bias
            bias = F.pad(bias, (0, more), value=float("-inf"))
            matrix = F.pad(matrix, (0, 0, 0, more))
        return score_hidden(hidden, matrix, bias, target)

    @abstractmethod
    def factors(self, hidden: Tensor, embedding: Tensor, *columns: Any) -> Factors:
        """The factors of the logits; arguments as for `forward`."""


def answer(
    name: str,
    head: nn.Module,
    target: Target | None,
    vocabulary: int,
    hidden: Tensor,
    matrix: Tensor | None,
    *columns: Tensor | None,
) -> dict[str, Tensor]:
    """Runs the head of an output.

    Its logits; or, if it has a target, its scores, where all logits at once would be large, or the
    vocabulary's size is slow.

    Args:
        target: the tokens that the output should predict, if they are given.
        vocabulary: V.
    """
    # A head for a task has few classes, so its logits are small.
    if target is None or not isinstance(head, VocabularyHead):
        return {name: head(hidden, matrix, *columns)}
    is_fast = vocabulary % product_multiple(hidden.device) == 0
    if target.chunks(vocabulary) == 1 and is_fast:
        return {name: head(hidden, matrix, *columns)}
    return {scores_of(name): head(hidden, matrix, *columns, target=target)}


class MaskedLMHead(VocabularyHead):
    """Predicts tokens: dense, activation, norm, then the output matrix and a bias."""

    def __init__(self, config: TransformerConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(config.width, config.embedding_width, bias=config.head_bias)
        self.norm = config.build_norm(config.embedding_width)
        self.decoder = _decoder(config)
        self.bias = nn.Parameter(self.dense.weight.new_zeros(config.vocab_size))

    def factors(self, hidden: Tensor, embedding: Tensor, *_columns: Any) -> Factors:
        hidden = self.norm(activate(self.dense(hidden), self.activation))
        matrix = embedding if self.decoder is None else self.decoder.weight
        return hidden, matrix, self.bias


class LanguageModelHead(VocabularyHead):
    """Predicts tokens by the output matrix alone; if it is shared, of scaled hidden states.

    Args:
        scale: factor of the hidden states, if the matrix is shared.
        bias: whether logits have a bias (BART).
    """

    def __init__(self, config: TransformerConfig, scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.decoder = _decoder(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if bias else None

    def factors(self, hidden: Tensor, embedding: Tensor, *_columns: Any) -> Factors:
        if self.decoder is not None:
            return hidden, self.decoder.weight, self.bias
        return hidden if self.scale == 1 else hidden * self.scale, embedding, self.bias


class PooledHead(nn.Module):
    """Scores sequences by one position each: a pooler (BERT's: dense, tanh), dropout, a classifier.

    Args:
        classes: C.
        dropout_first: whether there is dropout before the pooler too (RoBERTa, T5).
        activation: after the pooler's dense layer.
        lstm_layers: below the head, whose dropout keys are split off the same key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        classes: int,
        dropout_first: bool = False,
        activation: Pooling = "tanh",
        lstm_layers: int = 0,
    ) -> None:
        super().__init__()
        self.dropout = config.head_dropout
        self.dropout_first = dropout_first
        self.below = 2 * lstm_layers
        self.activation = _POOLINGS[activation]
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, classes)

    def forward(self, hidden: Tensor, _embedding: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, P, D] -> logits [B, P, C]; key: int32 [B], None means no dropout."""
        # The last two keys: an LSTM below the head takes the ones before.
        before, after = (None, None) if key is None else split_key(key, self.below + 2)[-2:]
        if self.dropout_first:
            hidden = dropout(hidden, self.dropout, before)
        pooled = dropout(self.activation(self.pooler(hidden)), self.dropout, after)
        logits: Tensor = self.classifier(pooled)
        return logits


class TokenHead(nn.Module):
    """Scores each position separately: a classifier, after dropout."""

    def __init__(self, width: int, classes: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.dropout = dropout
        self.classifier = nn.Linear(width, classes, bias=bias)

    def forward(
        self, hidden: Tensor, _embedding: Tensor | None, key: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> logits [B, S, C]; key: int32 [B], None means no dropout."""
        logits: Tensor = self.classifier(dropout(hidden, self.dropout, key))
        return logits
