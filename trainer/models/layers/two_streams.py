"""XLNet's layers: relative attention in two streams (Yang et al. 2019; Dai et al. 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.layers import Projection
from trainer.models.layers.attention import Attention, take
from trainer.models.layers.dropout import dropout
from trainer.models.stack import Context

SITES = ("attention", "attention_output", "ffn_hidden", "ffn_output")
"""Places of dropout in one stream of a layer."""


def distance_encodings(length: int, width: int, device: torch.device) -> Tensor:
    """Sinusoids of the distances S, S - 1, ..., 1 - S of a query from a key: [2 S, D]."""
    distance = torch.arange(length, -length, -1, dtype=torch.float32, device=device)
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angle = distance[:, None] / 10000**exponent
    return torch.cat((angle.sin(), angle.cos()), -1)


class Keys(NamedTuple):
    """Keys and values for the queries of both streams.

    Attributes:
        key, value: of the content stream, [B, H, S, K].
        distances: keys of the distances, [H, 2 S, K]; see `distance_encodings`.
    """

    key: Tensor
    value: Tensor
    distances: Tensor


class RelativeAttention(Attention):
    """Attention to contents, distances and segments (Dai et al. 2019, section 3.3).

    The score of query i and key j is the sum of three products, each with a shift of the query
    that is learned:

        (q_i + u) k_j  +  (q_i + v) r_(i-j)  +  (q_i + w) s_ij

    r is a projected sinusoid of the distance, and s_ij one of two learned vectors, for the same or
    another segment (Yang et al. 2019, section 2.5).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        width, inner = config.width, self.inner
        self.qkv = Projection(width, 3 * inner, ("query", "key", "value"), bias=False)
        self.out = Projection(inner, width, ("out",), bias=False, into_residual=True)
        self.relative = Projection(width, inner, ("relative",), bias=False)
        self.content_shift = nn.Parameter(torch.empty(inner))
        self.distance_shift = nn.Parameter(torch.empty(inner))
        self.segment_shift = nn.Parameter(torch.empty(inner))
        self.segments = nn.Parameter(torch.empty(2 * inner))

    def project(self, content: Tensor, context: Context) -> tuple[Tensor, Keys]:
        """The queries [B, H, S, K] and keys of the content stream [B, S, D]."""
        query, key, value = self.split(self.qkv(content), 3)
        (distances,) = self.split(self.relative(context.columns["distances"].to(content.dtype)), 1)
        return query, Keys(key, value, distances[0])

    def of_queries(self, hidden: Tensor) -> Tensor:
        """The queries of the query stream: [B, P, D] -> [B, H, P, K]."""
        # Keys and values of the few predicted positions are cheap, and LoRA wraps the projection.
        return self.split(self.qkv(hidden), 3)[0]

    def forward(
        self,
        query: Tensor,
        keys: Keys,
        mask: Tensor | None,
        context: Context,
        at: Tensor | None = None,
    ) -> Tensor:
        """Queries [B, H, T, K] -> mixed values [B, T, H * K].

        Args:
            mask: as in `Context`; broadcasts to [B, 1, T, S].
            at: int [B, T], the positions of the queries; None: all positions, in order.
        """
        # The sum of all three products is scaled. `attend` scales its own product; the other two,
        # which it gets as a bias, are scaled here.
        scale = query.shape[-1] ** -0.5
        bias = self._of_distances(query + self._per_head(self.distance_shift), keys.distances, at)
        bias = (bias + self._of_segments(query, context.columns["token_types"], at)) * scale
        if mask is not None and mask.dtype == torch.bool:
            bias = bias.masked_fill(~mask, float("-inf"))
        elif mask is not None:  # scores to add, in XLA's loop over layers
            bias = bias + mask
        shifted = query + self._per_head(self.content_shift)
        return self.attend(shifted, keys.key, keys.value, bias, context.key("attention"))

    def _per_head(self, shift: Tensor) -> Tensor:
        """[H * K] -> [H, 1, K]."""
        return shift.view(self.heads, 1, -1)

    def _of_distances(self, query: Tensor, distances: Tensor, at: Tensor | None) -> Tensor:
        """Products with the keys of all distances, as scores of positions: [B, H, T, S]."""
        scores = query @ distances.transpose(-1, -2)  # column c is the distance S - c
        length = distances.shape[-2] // 2
        if at is not None:
            # A query at position i finds key j, at distance i - j, in column S - i + j.
            column = length - at.long()[..., None] + torch.arange(length, device=at.device)
            return scores.gather(3, column[:, None].expand(-1, scores.shape[1], -1, -1))
        # Row i needs the columns S - i to 2 S - i. Read as rows of one element less, each row
        # begins one column earlier than the row above; the first S elements are left out. With
        # S = 2, where ic is row i and column c:
        #     00 01 02 03 / 10 11 12 13  ->  02 03 10 / 11 12 13  ->  02 03 / 11 12
        batch, heads, _, count = scores.shape
        rows = scores.reshape(batch, heads, count, length)[:, :, 1:]
        return rows.reshape(batch, heads, length, count - 1)[..., :length]

    def _of_segments(self, query: Tensor, types: Tensor, at: Tensor | None) -> Tensor:
        """Products with the vectors of equal and of different segments: [B, H, T, S]."""
        vectors = self.segments.view(2, self.heads, -1).permute(1, 2, 0)  # [H, K, 2]
        same, other = ((query + self._per_head(self.segment_shift)) @ vectors).chunk(2, -1)
        # Two products for each query instead of one for each pair, which only chooses one.
        own = types if at is None else types.gather(1, at.long())
        differs = own[:, None, :, None] != types[:, None, None, :]
        return torch.where(differs, other, same)


class TwoStreamLayer(nn.Module):
    """A post-norm layer of one or two streams, with the same weights for both.

    The content stream [B, S, D] sees each token; the query stream [B, P, D], of the positions to
    predict, sees only their places (section 2.3). A layer of a model that predicts nothing gets
    the content stream alone.
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.static = config.static(index)
        self.dropout = config.dropout
        self.attention = RelativeAttention(config)
        self.attention_norm = config.build_norm()
        self.ffn = config.build_feed_forward(index)
        self.ffn_norm = config.build_norm()

    def forward(
        self,
        hidden: Tensor | tuple[Tensor, Tensor],
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the streams that it gets.

        With one stream, only `context.positions` are computed if they are given. With two, these
        mark the last layer, whose content stream nothing reads.
        """
        columns = context.columns
        if isinstance(hidden, Tensor):
            query, keys = self.attention.project(hidden, context)
            mixed = self.attention(query, keys, context.mask, context)
            return self._finish(hidden, mixed, context, context.positions)
        content, predicted = hidden
        query, keys = self.attention.project(content, context)
        # The second half of the dropout keys is the query stream's. A predicted position has the
        # masks of its place in the row, whatever else is predicted; but in attention probabilities,
        # the masks of its place among the predicted positions, which depend on their number, too.
        own = replace(
            context,
            sites=SITES,
            keys=None if context.keys is None else context.keys[len(SITES) :],
            positions=columns["predicted"],
        )
        of_predicted = self.attention.of_queries(predicted)
        mixed = self.attention(of_predicted, keys, columns["visible"], own, columns["predicted"])
        predicted = self._finish(predicted, mixed, own, None)
        # Both streams attend to the content stream below this layer, so their order is free.
        if context.positions is None:
            mixed = self.attention(query, keys, context.mask, context)
            content = self._finish(content, mixed, context, None)
        return content, predicted

    def _finish(
        self, hidden: Tensor, mixed: Tensor, context: Context, positions: Tensor | None
    ) -> Tensor:
        """Everything after the attention scores: [B, T, D], or `positions` [B, P] of it alone."""
        at = context.positions
        branch = self.attention.out(take(mixed, positions))
        branch = dropout(branch, self.dropout, context.key("attention_output"), at)
        hidden = self.attention_norm(take(hidden, positions) + branch)
        branch = dropout(self.ffn(hidden, context), self.dropout, context.key("ffn_output"), at)
        out: Tensor = self.ffn_norm(hidden + branch)
        return out
