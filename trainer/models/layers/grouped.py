"""Parts of Llama and its relatives: attention with fewer heads of keys and values than of queries
(Ainslie et al. 2023), and layers that normalize the output of each branch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.fused import Mask
from trainer.models.layers import Projection
from trainer.models.layers.attention import CrossAttention, SelfAttention, take
from trainer.models.layers.dropout import dropout
from trainer.models.layers.layer import Layer
from trainer.models.layers.rotary import turn
from trainer.models.stack import Context


class Grouping(NamedTuple):
    """How a layer projects and places its heads.

    Attributes:
        kv_heads: G, heads of keys and values. With H = 6 and G = 2, heads 0 to 2 of the queries
            read head 0 of the keys and values.
        bias: whether projections to queries, keys and values have biases.
        norm: whether queries and keys are normalized, head by head.
        joint_norm: whether they are normalized over all their heads at once.
        rotates: whether queries and keys are rotated by their positions.
        window: see `SelfAttention`.
    """

    kv_heads: int
    bias: bool = False
    norm: bool = False
    joint_norm: bool = False
    rotates: bool = True
    window: int | None = None


class GroupedProjection(nn.Module):
    """Projections to queries, and to keys and values, which have another width."""

    def __init__(self, width: int, query: int, key: int, bias: bool) -> None:
        super().__init__()
        self.query = Projection(width, query, ("query",), bias=bias)
        # Keys and values in one matrix product: they are equally wide.
        self.kv = Projection(width, 2 * key, ("key", "value"), bias=bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, D] -> queries [B, S, H * K], keys and values [B, S, G * K]."""
        key, value = self.kv(hidden).chunk(2, -1)
        return self.query(hidden), key, value


class GroupedAttention(SelfAttention):
    """Self-attention whose groups of heads share their keys and values.

    Caches hold G heads. They are repeated for the product with the queries alone.
    """

    def __init__(self, config: TransformerConfig, grouping: Grouping) -> None:
        super().__init__(config)
        self.kv_heads, self.window = grouping.kv_heads, grouping.window
        self.rotates = grouping.rotates
        width = config.head_width
        keys = grouping.kv_heads * width
        self.qkv = GroupedProjection(config.width, self.inner, keys, grouping.bias)
        self.joint_norm = grouping.joint_norm
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if grouping.norm or grouping.joint_norm:
            self.query_norm = config.build_norm(self.inner if grouping.joint_norm else width)
            self.key_norm = config.build_norm(keys if grouping.joint_norm else width)

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.qkv(hidden)
        if self.joint_norm:
            query, key = self._normalized(query, key)
        return tuple(
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(
                (query, key, value), (self.heads, self.kv_heads, self.kv_heads), strict=True
            )
        )

    def _normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        # Norms give fp32, and the kernels take queries, keys and values of one precision.
        return self.query_norm(query).to(query.dtype), self.key_norm(key).to(key.dtype)

    def place(self, query: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        if not self.joint_norm:
            query, key = self._normalized(query, key)
        if not self.rotates:
            return query, key
        cos, sin = context.columns["cos"], context.columns["sin"]
        return turn(query, cos, sin), turn(key, cos, sin)

    def _visible(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        bias: Tensor | None,
        context: Context,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        key, value, mask = super()._visible(query, key, value, hidden, bias, context)
        return self._repeated(key), self._repeated(value), mask

    def attend_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        bias: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        # The kernels take as many heads of keys as of queries.
        key, value = self._repeated(key), self._repeated(value)
        return super().attend_fused(query, key, value, mask, bias, dropout_key)

    def _repeated(self, part: Tensor) -> Tensor:
        return repeat_heads(part, self.heads)


class GroupedCrossAttention(CrossAttention):
    """Cross-attention whose groups of heads share their keys and values."""

    def __init__(self, config: TransformerConfig, kv_heads: int) -> None:
        super().__init__(config)
        self.kv_heads = kv_heads
        keys = kv_heads * config.head_width
        self.kv = Projection(config.width, 2 * keys, self.kv.parts, bias=False)

    def split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        if parts == 1:  # queries
            return super().split(projected, parts)
        return tuple(
            repeat_heads(part.view(*part.shape[:2], self.kv_heads, -1).transpose(1, 2), self.heads)
            for part in projected.chunk(parts, dim=-1)
        )


def repeat_heads(part: Tensor, heads: int) -> Tensor:
    """Repeats each head of keys or values for its group of queries: [B, G, S, K] -> [B, H, S, K].

    With H = 6 and G = 2, heads 0 1 become 0 0 0 1 1 1.
    """
    times = heads // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, dim=1)


class OutputNormLayer(Layer):
    """A layer that normalizes the output of each branch: x + norm(f(x)) (OLMo et al. 2025)."""

    def forward(
        self, hidden: Tensor, memory: Tensor | None, bias: Tensor | None, context: Context
    ) -> Tensor:
        assert memory is None, "it has no cross-attention"
        read = context.positions
        branch = self.attention_norm(self.attention(hidden, bias, context, read))
        key = context.key("attention_output")
        hidden = take(hidden, read) + dropout(branch, self.dropout, key, read)
        branch = self.ffn_norm(self.ffn(hidden, context))
        return hidden + dropout(branch, self.dropout, context.key("ffn_output"), read)
