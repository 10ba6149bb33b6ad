"""Input embeddings: the sum of token, position and type, normalised (Devlin et al. 2019, figure 2)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout
from trainer.models.layers import LayerNorm


class Embeddings(nn.Module):
    """Learned embeddings, dropped out."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions + config.position_offset, config.width)
        self.types = nn.Embedding(config.type_vocab, config.width)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)

    def forward(
        self, tokens: Tensor, positions: Tensor, token_types: Tensor | None, dropout_key: Tensor | None
    ) -> Tensor:
        """int [B, S] each -> [B, S, D]; without token_types every cell is of type 0."""
        types = self.types.weight[0] if token_types is None else self.types(token_types)
        total = self.tokens(tokens) + self.positions(positions + self.position_offset) + types
        return dropout(self.norm(total), self.dropout, dropout_key)
