"""A model of one's own: a Transformer whose token embeddings are narrower than its layers.

The layers come from `samestep.Family`, whose methods `build_...` are overridden where the model
differs. Parameters get their values from samestep, so modules do not initialize any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

import samestep


@dataclass(frozen=True)
class Config(samestep.Family):
    """Settings of the model, beside those of every Transformer (layers, width, heads, ...).

    Attributes:
        embedding_width: E, of the token embeddings.
        max_positions: number of positions.
    """

    embedding_width: int = 128
    max_positions: int = 512

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (0.02,)

    def build_embeddings(self) -> nn.Module:
        return NarrowEmbeddings(self)

    def build_base(self) -> samestep.Transformer:
        return samestep.Transformer(self, NarrowHead(self))


class NarrowEmbeddings(nn.Module):
    """Token embeddings of width E and positions, projected to the width D of the layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        self.positions = nn.Embedding(config.max_positions, config.embedding_width)
        self.projection = nn.Linear(config.embedding_width, config.width)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        dropout_key: Tensor | None = None,
        prompt: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of the layers [B, S, D], and the table [V, E] for the head."""
        return self.projection(self.tokens(tokens) + self.positions(positions)), self.tokens.weight


class NarrowHead(nn.Module):
    """Logits from the table of the token embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.projection = nn.Linear(config.width, config.embedding_width)

    def forward(self, hidden: Tensor, table: Tensor, dropout_key: Tensor | None = None) -> Tensor:
        """[B, P, D] -> [B, P, V]."""
        return F.linear(self.projection(hidden), table)
