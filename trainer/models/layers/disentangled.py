"""Disentangled attention: contents and relative positions apart (He et al. 2021, section 3.1)."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.layers import Projection
from trainer.models.layers.attention import SelfAttention, take
from trainer.models.layers.dropout import dropout
from trainer.models.layers.layer import Layer
from trainer.models.stack import Context


@functools.lru_cache(maxsize=32)
def place_table(length: int, buckets: int, farthest: int) -> npt.NDArray[np.int64]:
    """The row of the relative embeddings for each pair of positions: [S, S].

    Row i, column j is for query i and key j. With `buckets` b > 0, distances up to b / 2 have rows
    of their own, and farther ones share rows that grow logarithmically up to `farthest`; without,
    distances beyond `farthest` share the last row.
    """
    # In NumPy, so that every device uses the same rows: logarithms of devices differ in the last
    # bits, which decide at the bounds of a bucket. The table also has values while the model runs
    # on tensors that have none.
    places = np.arange(length)
    distance = places[:, None] - places
    span = farthest
    if buckets > 0:
        span, middle = buckets, buckets // 2
        far = np.maximum(np.abs(distance), middle) / middle
        growth = math.log((farthest - 1) / middle)
        rows = np.ceil(np.log(far) / growth * (middle - 1)) + middle
        near = np.abs(distance) <= middle
        distance = np.where(near, distance, (rows * np.sign(distance)).astype(np.int64))
    return (distance + span).clip(0, 2 * span - 1)


class RelativeEmbeddings(nn.Module):
    """The embeddings of relative positions, shared by all layers: [2 * span, D]."""

    def __init__(self, config: TransformerConfig, span: int, normalized: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * span, config.width))
        self.norm = config.build_norm() if normalized else None

    def forward(self, first: int, stop: int) -> Tensor:
        """The rows [first, stop)."""
        rows = self.weight[first:stop]
        return rows if self.norm is None else self.norm(rows)


class DisentangledAttention(SelfAttention):
    """The sum of content-to-content, content-to-position and position-to-content scores (eq. 4).

    Of DeBERTa v2 and v3, which project positions with the matrices of contents. The argument `bias`
    of layers is the relative embeddings here, and the column `places` their rows.
    """

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None = None,
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for `positions` [B, P] only."""
        out: Tensor = self.out(take(self.mix(hidden, hidden, bias, context), positions))
        return out

    def mix(
        self,
        queries: Tensor,
        hidden: Tensor,
        relative: Tensor | None,
        context: Context,
        at: Tensor | None = None,
    ) -> Tensor:
        """Values of `hidden` [B, S, D], mixed for each query: [B, T, H * K].

        Args:
            queries: [B, T, D].
            relative: the relative embeddings, [R, D].
            at: int [B, T], the positions of the queries; None: all positions, in order.
        """
        assert relative is not None, "the model has relative embeddings"
        query, key, value = self.project(queries, hidden)
        # Few places, many pairs: 2 * 256 places serve 512 * 512 pairs of positions.
        place_query, place_key = self.of_places(relative)
        rows, mask = context.columns["places"][None], context.mask
        if at is not None:
            rows = rows[0][at.long()]
            mask = None if mask is None else mask.take_along_dim(at.long()[:, None, :, None], 2)
        scale = self._scale(query)
        # All products of contents with the R places first, then those that each pair needs.
        shape = (*query.shape[:2], -1, -1)
        of_query = (query @ place_key.mT).gather(3, rows[:, None].expand(shape))
        of_key = (key @ place_query.mT).gather(3, rows.mT[:, None].expand(shape))
        scores = (of_query + of_key.mT) * scale
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:  # scores to add, in XLA's loop over layers
            scores = scores + mask
        if context.scores is not None:
            context.scores.append(self.scores(query, key, scores))
        return self.attend(query, key, value, scores, context.key("attention"))

    def project(self, queries: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, K], keys and values [B, H, S, K]."""
        query, key, value = self.split(self.qkv(hidden), 3)
        if queries is not hidden:
            query = self.split(self.qkv(queries), 3)[0]
        return query, key, value

    def of_places(self, relative: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of the relative positions, [H, R, K] each."""
        # The product with the value matrix is not used: one matrix is not worth another parameter.
        query, key, _ = self.split(self.qkv(relative[None]), 3)
        return query[0], key[0]


class SeparateAttention(DisentangledAttention):
    """Disentangled attention of DeBERTa v1: own matrices for positions, no bias of keys."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        width, inner = config.width, self.inner
        self.qkv = Projection(width, 3 * inner, ("query", "key", "value"), bias=False)
        self.query_bias = nn.Parameter(torch.empty(inner))
        self.value_bias = nn.Parameter(torch.empty(inner))
        self.place_key = Projection(width, inner, ("place_key",), bias=False)
        self.place_query = Projection(width, inner, ("place_query",), bias=True)

    def project(self, queries: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(queries, hidden)
        per_head = (self.heads, 1, -1)
        return query + self.query_bias.view(per_head), key, value + self.value_bias.view(per_head)

    def of_places(self, relative: Tensor) -> tuple[Tensor, Tensor]:
        (query,) = self.split(self.place_query(relative[None]), 1)
        (key,) = self.split(self.place_key(relative[None]), 1)
        return query[0], key[0]


class DisentangledLayer(Layer):
    """A post-norm layer; called with (queries, hidden states), queries attend to hidden states."""

    attention: DisentangledAttention

    def forward(
        self,
        hidden: Tensor | tuple[Tensor, Tensor],
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
    ) -> Tensor:
        """[B, S, D], or queries [B, P, D] at `context.positions` and [B, S, D], -> [B, P, D]."""
        if isinstance(hidden, Tensor):
            return super().forward(hidden, memory, bias, context)
        queries, content = hidden
        at = context.positions
        branch = self.attention.out(self.attention.mix(queries, content, bias, context, at))
        branch = dropout(branch, self.dropout, context.key("attention_output"), at)
        queries = self.attention_norm(queries + branch)
        branch = dropout(self.ffn(queries, context), self.dropout, context.key("ffn_output"), at)
        out: Tensor = self.ffn_norm(queries + branch)
        return out


class ConvolutionLayer(DisentangledLayer):
    """The first layer of DeBERTa v2: a convolution over its input is added to its output.

    Args:
        config: of the model.
        index: of the layer.
        size: number of neighboring positions in the convolution, odd.
        activation: after it, `tanh` or `gelu`.
    """

    def __init__(self, config: TransformerConfig, index: int, size: int, activation: str) -> None:
        super().__init__(config, index)
        self.size = size
        self.activate = torch.tanh if activation == "tanh" else nn.functional.gelu
        inner = size * config.width
        self.convolution = Projection(inner, config.width, ("convolution",), bias=True)
        self.convolution_norm = config.build_norm()

    def forward(  # type: ignore[override]
        self, hidden: Tensor, memory: Tensor | None, bias: Tensor | None, context: Context
    ) -> Tensor:
        # All positions: the convolution of a position needs its neighbors.
        out = super().forward(hidden, memory, bias, replace(context, positions=None))
        neighbors = self.neighbors(hidden, context.columns["segments"])
        added = dropout(self.convolution(neighbors), self.dropout, context.key("convolution"))
        out = self.convolution_norm(out + self.activate(added))
        return take(out, context.positions)

    def neighbors(self, hidden: Tensor, segments: Tensor) -> Tensor:
        """The states of neighboring positions side by side: [B, S, size * D].

        Neighbors in another packed sequence, or beyond the row, are 0.
        """
        # With a size of 3, position 1 of a b | c (c is another sequence) gets a, b and 0.
        found, half, length = [], self.size // 2, hidden.shape[1]
        padded = nn.functional.pad(hidden, (0, 0, half, half))
        around = nn.functional.pad(segments, (half, half), value=-1)
        for offset in range(self.size):
            same = around[:, offset : offset + length] == segments
            found.append(padded[:, offset : offset + length] * same[..., None])
        return torch.cat(found, -1)
