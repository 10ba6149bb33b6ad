"""Multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout


def segment_mask(segments: Tensor, causal: bool = False) -> Tensor:
    """Lets each cell attend to the cells of its own segment: [B, S] -> bool [B, 1, S, S].

    Padding is a segment like any other, so no row of the mask is empty and no softmax gives NaN. `causal` leaves out
    the cells after it.
    """
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same.tril() if causal else same


def take(x: Tensor, cells: Tensor | None) -> Tensor:
    """The hidden states of some cells, int [B, P]: [B, S, D] -> [B, P, D]; of all when `cells` is None."""
    return x if cells is None else x.take_along_dim(cells.long()[..., None], dim=1)


class SelfAttention(nn.Module):
    """Bidirectional self-attention with one projection for queries, keys and values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, dropout_key: Tensor | None, cells: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for cells [B, P] alone.

        mask: bool [B, 1, S, S], True where attention is allowed; None allows all.
        """
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1)
        )  # each [B, H, S, K]
        if dropout_key is None or self.dropout == 0:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            mixed = self._eager(query, key, value, mask, dropout_key)
        out: Tensor = self.out(take(mixed.transpose(1, 2).flatten(2), cells))
        return out

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_key: Tensor) -> Tensor:
        """Writes the probabilities out, because the fused kernels cannot take our dropout mask."""
        scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = scores.softmax(-1, dtype=torch.float32)
        return dropout(probabilities, self.dropout, dropout_key).to(value.dtype) @ value
