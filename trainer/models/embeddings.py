"""Input embeddings: the sum of token, position and type, normalised (Devlin et al. 2019, figure 2)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.dropout import dropout


class Embeddings(nn.Module):
    """Learned embeddings; `position_offset` rows at the start of the position table stay unused (RoBERTa)."""

    def __init__(
        self,
        vocab_size: int,
        positions: int,
        position_offset: int,
        types: int,
        width: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.position_offset = position_offset
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(positions + position_offset, width)
        self.types = nn.Embedding(types, width)
        self.norm = nn.LayerNorm(width, eps=norm_eps)

    def forward(
        self, tokens: Tensor, positions: Tensor, token_types: Tensor | None, dropout_key: Tensor | None
    ) -> Tensor:
        """int [B, S] each -> [B, S, D]; without token_types every cell is of type 0."""
        types = self.types.weight[0] if token_types is None else self.types(token_types)
        total = self.tokens(tokens) + self.positions(positions + self.position_offset) + types
        return dropout(self.norm(total), self.dropout, dropout_key)
