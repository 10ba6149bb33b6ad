"""Output heads: called as head(hidden, token_embeddings, dropout_key), though not all use each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import product_multiple
from trainer.models import scores_of
from trainer.models.config import Activation, Pooling, TransformerConfig
from trainer.models.layers.attention import take
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.layer import activate
from trainer.models.layers.norms import LayerNorm
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


class ScalarMix(nn.Module):
    """A learned mean of all layers, for a head on frozen features (Peters et al. 2018, equation 1).

    gain * sum_j softmax(scores)_j h_j; at first all layers count alike, and the gain is 1.

    Args:
        layers: number of layers, the embeddings included.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.empty(layers))
        self.gain = nn.Parameter(torch.empty(1))  # minus 1, so that it begins with 0

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """The hidden states of all layers, [B, S, D] each -> [B, S, D]."""
        shares = self.scores.float().softmax(0)
        # One after the other: no tensor [layers, B, S, D] is needed.
        mixed = sum(share * state for share, state in zip(shares, states, strict=True))
        return cast(Tensor, (1 + self.gain) * mixed)


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


class SpanBoundaryHead(VocabularyHead):
    """Predicts a token of a span from the states outside of it (Joshi et al. 2020, section 3.2).

    Two layers with GELU and norm read the state before the span, the state after it, and an
    embedding of the token's place in the span; the output matrix is the token embeddings.

    Args:
        config: of the model.
        positions: number of places with an embedding; later ones share the last.
        width: of these embeddings.
    """

    def __init__(self, config: TransformerConfig, positions: int = 20, width: int = 200) -> None:
        super().__init__()
        self.positions = nn.Embedding(positions, width)
        self.first = nn.Linear(2 * config.width + width, config.width)
        self.first_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.second = nn.Linear(config.width, config.embedding_width)
        self.second_norm = LayerNorm(config.embedding_width, eps=config.norm_eps)

    def factors(self, hidden: Tensor, embedding: Tensor, *columns: Any) -> Factors:
        """[B, S, D], token embeddings [V, E], the columns of `mlm_sbo`, int [B, P] each."""
        first, last, offset = columns
        # [CLS] and [SEP] surround every sequence, so the states before and after a span exist.
        place = self.positions(offset.clamp(max=self.positions.num_embeddings - 1))
        read = torch.cat([take(hidden, first - 1), take(hidden, last + 1), place], -1)
        inner = self.first_norm(F.gelu(self.first(read)))
        return self.second_norm(F.gelu(self.second(inner))), embedding, None


class PooledHead(nn.Module):
    """Scores sequences by one position each: a pooler (BERT's: dense, tanh), dropout, a classifier.

    Args:
        classes: C.
        dropout_first: whether there is dropout before the pooler too (RoBERTa, T5).
        activation: after the pooler's dense layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        classes: int,
        dropout_first: bool = False,
        activation: Pooling = "tanh",
    ) -> None:
        super().__init__()
        self.dropout = config.head_dropout
        self.dropout_first = dropout_first
        self.below = 2 * config.head_lstm  # keys that an LSTM below splits off the same key
        self.activation = _POOLINGS[activation]
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, classes)

    def forward(self, hidden: Tensor, _embedding: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, P, D] -> logits [B, P, C]; key: int32 [B], None means no dropout."""
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


class NextSentenceHead(nn.Module):
    """Predicts whether segment B follows A: BERT's pooler (dense, tanh) and a classifier."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, first: Tensor) -> Tensor:
        """Hidden states of the first position [B, D] -> logits [B, 2]: follows, is random."""
        logits: Tensor = self.classifier(self.pooler(first).tanh())
        return logits
