"""Multi-head attention (Vaswani et al.

2017, section 3.2): of a sequence to itself, and to the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import fuses_trained_bias
from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout
from trainer.models.projections import Projection
from trainer.models.stack import Context


def segment_mask(segments: Tensor, causal: bool = False, prefix: Tensor | None = None) -> Tensor:
    """Lets each cell attend to the cells of its own segment: [B, S] -> bool [B, 1, S, S].

    Padding is a segment like any other, so no row of the mask is empty and no softmax gives NaN.
    `causal` leaves out the cells after it, except those in `prefix`, bool [B, S].
    """
    same = segments[:, None, :, None] == segments[:, None, None, :]
    if not causal:
        return same
    return (
        same.tril() if prefix is None else same & (prefix[:, None, None, :] | causal_mask(segments))
    )


def causal_mask(cells: Tensor) -> Tensor:
    """Lets each cell attend to itself and those before it: [B, S] -> bool [S, S]."""
    return torch.ones(cells.shape[1], cells.shape[1], dtype=torch.bool, device=cells.device).tril()


def take(x: Tensor, cells: Tensor | None) -> Tensor:
    """The hidden states of some cells, int [B, P]: [B, S, D] -> [B, P, D].

    Of all when `cells` is None.
    """
    return x if cells is None else x.take_along_dim(cells.long()[..., None], dim=1)


class Attention(nn.Module):
    """What both kinds of attention share: heads, scale, dropout and kernel.

    Attributes:
        kernel: computes attention without dropout; a strategy may put another function in its
            place.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.inner = config.heads * config.head_width
        self.scale = config.attention_scale
        self.dropout = config.attention_dropout
        self.kernel: Callable[..., Tensor] = F.scaled_dot_product_attention

    def split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[B, S, parts * H * K] -> `parts` times [B, H, S, K]."""
        return tuple(
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for part in projected.chunk(parts, dim=-1)
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_key: Tensor | None,
        causal: bool = False,
    ) -> Tensor:
        """Mixes the values: query [B, H, T, K], key and value [B, H, S, K] -> [B, T, H * K].

        mask: bool, True where attention is allowed, or float, added to the scores; broadcasts to
            [B, H, T, S]. Or what the kernel takes instead.
        """
        drops = dropout_key is not None and self.dropout > 0
        # Without a fused kernel SDPA computes the scores in full as well, and guards against empty
        # rows, which our masks never have.
        unfused = mask is not None and mask.requires_grad and not fuses_trained_bias(mask)
        if drops or unfused:
            mask = causal_mask(query[:, 0, :, 0]) if causal else mask
            mixed = self._eager(query, key, value, mask, dropout_key)
        else:
            mixed = self.kernel(
                query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale
            )
        return mixed.transpose(1, 2).flatten(2)

    def _eager(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        """Eager attention: fused kernels take neither our dropout masks nor every learned bias."""
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (query if scale == 1 else query * scale) @ key.transpose(-1, -2)
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill_(~mask, float("-inf")) if is_bool else scores.add_(mask)
        probabilities = scores.softmax(-1, dtype=torch.float32)
        return dropout(probabilities, self.dropout, dropout_key).to(value.dtype) @ value


class SelfAttention(Attention):
    """Self-attention with one projection for queries, keys and values.

    Attributes:
        prefix: returns keys and values that all positions attend to besides (`peft.prefix`).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        bias = config.projection_bias
        self.qkv = Projection(config.width, 3 * self.inner, ("query", "key", "value"), bias=bias)
        self.out = Projection(self.inner, config.width, ("out",), bias=bias, into_residual=True)
        self.prefix: nn.Module | None = None

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for `positions` [B, P] alone.

        bias: float, added to the scores in place of a mask, which is part of it.
        """
        query, key, value = self.split(self.qkv(hidden), 3)
        if context.cache is not None:
            key, value = context.cache.append(key, value)
        mask = context.mask if bias is None else bias
        if self.prefix is not None:
            before = self.prefix(key)
            if mask is None and context.causal:
                mask = causal_mask(hidden)[None, None]
            if mask is not None:
                allowed = True if mask.dtype == torch.bool else 0.0
                mask = F.pad(mask, (before[0].shape[2], 0), value=allowed)
            key, value = (torch.cat(pair, 2) for pair in zip(before, (key, value), strict=True))
        # A mask of two dimensions is segments, for kernels that know them; it leaves out direction.
        causal = context.causal and (mask is None or mask.ndim == 2)
        mixed = self.attend(query, key, value, mask, context.key("attention"), causal=causal)
        out: Tensor = self.out(take(mixed, positions))
        return out


class CrossAttention(Attention):
    """Attention to the encoder's output, with one projection for keys and values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        bias, parts = config.projection_bias, ("cross_key", "cross_value")
        self.query = Projection(config.width, self.inner, ("cross_query",), bias=bias)
        self.kv = Projection(config.width, 2 * self.inner, parts, bias=bias)
        self.out = Projection(
            self.inner, config.width, ("cross_out",), bias=bias, into_residual=True
        )

    def forward(self, hidden: Tensor, memory: Tensor, context: Context) -> Tensor:
        """[B, T, D], memory [B, M, D] -> [B, T, D]; with a cache, keys and values are computed in
        the first call only.

        Rows that share a source, as `Cache.select` allows, attend to it like further positions of
        a single row.
        """
        cache = context.cache
        pair = None if cache is None else cache.memory
        if pair is None:
            key, value = self.split(self.kv(memory), 2)
            pair = (key, value)
        if cache is not None:
            cache.memory = pair
        (query,) = self.split(self.query(hidden), 1)
        query = query.view(len(pair[0]), -1, *query.shape[1:]).transpose(1, 2).flatten(2, 3)
        mixed = self.attend(query, *pair, context.memory_mask, context.key("cross_attention"))
        out: Tensor = self.out(mixed.reshape(*hidden.shape[:2], -1))
        return out
