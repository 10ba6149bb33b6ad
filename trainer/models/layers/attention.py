"""Multi-head attention (Vaswani et al. 2017, section 3.2): self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import fuses_trained_bias, indexes_fast, without_autocast
from trainer.models.config import TransformerConfig
from trainer.models.fused import FusedAttention, Mask
from trainer.models.layers import Projection
from trainer.models.layers.dropout import attention_dropout
from trainer.models.stack import Context


def segment_mask(segments: Tensor, causal: bool = False, prefix: Tensor | None = None) -> Tensor:
    """Allows attention within segments: int [B, S] -> bool [B, 1, S, S].

    Padding is a segment like any other, so no row of the mask is empty and no softmax gives NaN.
    `causal` forbids later positions, except those in `prefix`, bool [B, S].

    With segments 1 1 2 0, position 0 may attend to positions 0 and 1, or with `causal` to itself.
    """
    same = segments[:, None, :, None] == segments[:, None, None, :]
    if not causal:
        return same
    if prefix is None:
        return same.tril()
    return same & (prefix[:, None, None, :] | causal_mask(segments))


def causal_mask(tokens: Tensor) -> Tensor:
    """Allows attention to a position itself and to earlier ones: [B, S] -> bool [S, S]."""
    length = tokens.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()


def near_mask(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Allows attention to at most `window` positions away: bool [T, S].

    Distances count all positions between two, also across packed sequences. With a window of 1 and
    3 positions, the mask is 110, 111, 011. With a cache, the queries are the last T positions: the
    mask of the third alone is 011.

    Args:
        query: [B, H, T, K].
        key: [B, H, S, K].
    """
    place = torch.arange(key.shape[2], device=key.device)
    return (place[-query.shape[2] :, None] - place).abs() <= window


def take(x: Tensor, positions: Tensor | None) -> Tensor:
    """Selects positions, int [B, P]: [B, S, D] -> [B, P, D]. None selects all.

    Where gathering is slow, it is a product with a 0/1 matrix [B, P, S], if that is not larger than
    `x`. Then a layer of width D has at least 12 times its FLOPs.
    """
    if positions is None:
        return x
    index = positions.long()[..., None]
    if indexes_fast(x.device) or positions.shape[1] > x.shape[2]:
        return x.take_along_dim(index, dim=1)
    chosen = index == torch.arange(x.shape[1], device=x.device)
    # Autocast would round x.
    with without_autocast(x.device):
        return chosen.to(x.dtype) @ x


class Attention(nn.Module):
    """Heads, scale, dropout and kernels of both kinds of attention.

    Attributes:
        kernel: computes attention without dropout; a strategy may replace it.
        fused: computes attention where the context has a mask for it; see `Model.fuse_attention`.
        dropout_version: which masks; see `training.dropout_version`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.inner = config.heads * config.head_width
        self.scale = config.attention_scale
        self.dropout = config.attention_dropout
        self.kernel: Callable[..., Tensor] = F.scaled_dot_product_attention
        self.fused: FusedAttention | None = None
        self.dropout_version = 2

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

        Args:
            mask: bool, True where attention is allowed, or float, added to the scores; broadcasts
                to [B, H, T, S]. A replaced kernel may take another form.
        """
        # PyTorch's kernels take neither dropout masks computed from keys, nor, on some devices, a
        # learned bias. SDPA's own fallback is slower than ours: it guards against rows with
        # nothing to attend to, which our masks never have.
        drops = dropout_key is not None and self.dropout > 0
        learned = mask is not None and mask.requires_grad and not fuses_trained_bias(mask)
        if drops or learned:
            mask = causal_mask(query[:, 0, :, 0]) if causal else mask
            mixed = self._eager(query, key, value, mask, dropout_key)
        else:
            mixed = self.kernel(
                query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale
            )
        return mixed.transpose(1, 2).flatten(2)

    def attend_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        bias: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        """Like `attend`, by the fused kernel; `bias` is by distance (see `FusedAttention`)."""
        assert self.fused is not None, "the model has no fused attention"
        assert mask.segments is None or mask.key_segments is not None or query.shape == key.shape
        mixed = self.fused(
            query,
            key,
            value,
            segments=mask.segments,
            key_segments=mask.segments if mask.key_segments is None else mask.key_segments,
            causal=mask.causal,
            prefix=mask.prefix,
            window=mask.window,
            bias=bias,
            scale=self._scale(query),
            dropout=0.0 if dropout_key is None else self.dropout,
            dropout_key=dropout_key,
            dropout_version=self.dropout_version,
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
        probabilities = self.scores(query, key, mask).softmax(-1, dtype=torch.float32)
        dropped = attention_dropout(probabilities, self.dropout, dropout_key, self.dropout_version)
        return dropped.to(value.dtype) @ value

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Scores [B, H, T, S], minus infinity where attention is not allowed; see `attend`."""
        scale = self._scale(query)
        # Scaling the queries is cheaper than scaling the scores: [T, K] is smaller than [T, S].
        scores = (query if scale == 1 else query * scale) @ key.transpose(-1, -2)
        if mask is None:
            return scores
        is_bool = mask.dtype == torch.bool
        return scores.masked_fill_(~mask, float("-inf")) if is_bool else scores.add_(mask)

    def _scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale


def is_fusible(module: Attention) -> bool:
    """Whether `fused` computes a module's attention.

    False for a class with its own `forward`, which computes other scores, and for a module with a
    prefix, whose keys are not positions.
    """
    if isinstance(module, SelfAttention):
        return type(module).forward is SelfAttention.forward and module.prefix is None
    return type(module).forward is CrossAttention.forward


class SelfAttention(Attention):
    """Self-attention with one fused projection for queries, keys and values.

    Attributes:
        kv_heads: number of heads of keys and values, as many as of queries by default.
        prefix: returns extra keys and values that all positions attend to (`peft.prefix`).
        window: positions attend to others at most this far away; None: to all.
    """

    window: int | None = None

    qkv: nn.Module

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.kv_heads = self.heads
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
        """[B, S, D] -> [B, S, D], or [B, P, D] for `positions` [B, P] only.

        Args:
            bias: float, added to the scores; it contains the mask. With `context.fused` it does
                not, and is by distance (see `FusedAttention`).
        """
        query, key, value = self.project_heads(hidden)
        query, key = self.place(query, key, context)
        if context.fused is not None:
            near = replace(context.fused, window=self.window)
            mixed = self.attend_fused(query, key, value, near, bias, context.key("attention"))
        else:
            # Cached keys, a window or a prefix change what a position sees.
            key, value, mask = self._visible(query, key, value, hidden, bias, context)
            # A four-dimensional mask contains the direction. One of two dimensions is segments, for
            # kernels that take them, without the direction.
            causal = context.causal and (mask is None or mask.ndim == 2)
            if context.scores is not None:
                whole = causal_mask(hidden) if causal else mask
                context.scores.append(self.scores(query, key, whole))
            mixed = self.attend(query, key, value, mask, context.key("attention"), causal)
        out: Tensor = self.out(take(mixed, positions))
        return out

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[B, S, D] -> queries, keys and values, [B, heads, S, K] each."""
        return self.split(self.qkv(hidden), 3)

    def _visible(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        bias: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All keys and values, and the mask of scores; arguments as for `attend` and `forward`."""
        if context.cache is not None:
            key, value = context.cache.append(key, value)
        mask = context.mask if bias is None else bias
        if self.window is not None:
            mask = self._limit(mask, near_mask(query, key, self.window), hidden, context)
        if self.prefix is not None:
            # The prefix comes before the first key and is visible to all positions. `is_causal`
            # aligns the first query with the first key, so it cannot express that.
            prefix_keys, prefix_values = self.prefix(key)
            if mask is None and context.causal:
                mask = causal_mask(hidden)[None, None]
            if mask is not None:
                allowed = True if mask.dtype == torch.bool else 0.0
                mask = F.pad(mask, (prefix_keys.shape[2], 0), value=allowed)
            key = torch.cat([prefix_keys, key], 2)
            value = torch.cat([prefix_values, value], 2)
        return key, value, mask

    def place(self, query: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Adds positions to queries and keys, [B, H, S, K] each; by default they have none."""
        return query, key

    def _limit(self, mask: Tensor | None, near: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Forbids attention outside of `near`, bool [T, S]."""
        if mask is None:
            return (near & causal_mask(hidden) if context.causal else near)[None, None]
        if mask.ndim == 2:  # segments, for a kernel that has no windows
            mask = segment_mask(mask, context.causal)
        if mask.dtype == torch.bool:
            return mask & near
        return mask.masked_fill(~near, float("-inf"))


class CrossAttention(Attention):
    """Attention to the encoder's output, with one fused projection for keys and values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        bias, parts = config.projection_bias, ("cross_key", "cross_value")
        self.query = Projection(config.width, self.inner, ("cross_query",), bias=bias)
        self.kv = Projection(config.width, 2 * self.inner, parts, bias=bias)
        self.out = Projection(
            self.inner, config.width, ("cross_out",), bias=bias, into_residual=True
        )

    def forward(self, hidden: Tensor, memory: Tensor, context: Context) -> Tensor:
        """[B, T, D], memory [B', M, D] -> [B, T, D].

        With a cache, keys and values are computed in the first call only. B may be a multiple of
        B' (see `Cache.select`).
        """
        cache = context.cache
        if cache is None or cache.memory is None:
            key, value = self.split(self.kv(memory), 2)
        else:
            key, value = cache.memory
        if cache is not None:
            cache.memory = (key, value)
        (query,) = self.split(self.query(hidden), 1)
        # Rows that share a source become further positions of one row, so its keys are not copied:
        # 2 sources with 3 beams of 1 position are queries [6, H, 1, K] -> [2, H, 3, K].
        query = query.view(len(key), -1, *query.shape[1:]).transpose(1, 2).flatten(2, 3)
        site = context.key("cross_attention")
        if context.fused_memory is not None:
            mixed = self.attend_fused(query, key, value, context.fused_memory, None, site)
        else:
            mixed = self.attend(query, key, value, context.memory_mask, site)
        out: Tensor = self.out(mixed.reshape(*hidden.shape[:2], -1))
        return out
