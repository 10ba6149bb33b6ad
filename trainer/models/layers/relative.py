"""T5's relative positions (Raffel et al. 2020, section 2.1): a learned bias by distance."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import autocast_dtype


@functools.cache
def _bounds(exact: int, count: int, max_distance: int) -> tuple[int, ...]:
    """The first distance of each bucket after number `exact`, which begins at distance `exact`.

    Bucket `exact` + k begins at exact * (max_distance / exact) ** (k / (count - exact)), rounded
    up: with 8, 16 and 128, at 12, 16, 23, 32, 46, 64, 91. Compared in integers, because a
    logarithm that is off in the last bit moves 16, 32 and 64 to another bucket.
    """
    ranges = count - exact
    bounds = []
    distance = exact
    for k in range(1, ranges):
        while distance**ranges < exact ** (ranges - k) * max_distance**k:
            distance += 1
        bounds.append(distance)
    return tuple(bounds)


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distances, shared by the layers of a stack.

    Half of the buckets hold one distance each, the others ranges that grow logarithmically up to
    `max_distance`; the last holds all beyond (`_relative_position_bucket` of mesh-tensorflow).
    `bidirectional` reserves half of the buckets for later positions; otherwise these share the
    bucket of distance 0.
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def forward(self, queries: int, keys: int, mask: Tensor | None, before: int = 0) -> Tensor:
        """The bias of scores between `queries` positions, after `before` others, and `keys` ones.

        Distances are measured in the row. Within a segment they equal distances in the sequence;
        other pairs are masked.

        Args:
            queries, keys: T, S.
            mask: bool, broadcasts to [B, 1, T, S]; False becomes minus infinity. None masks
                nothing.
            before: number of positions before the first query.

        Returns:
            [B, H, T, S], or [1, H, T, S] without a mask, in the precision of matrix products.
        """
        by_distance = self.by_distance(queries, keys, before)
        # Each row of the result is the row above, shifted right by one. Reading a repeated vector
        # of n values as rows of n - 1 does that without a gather. T = 2 and S = 3 have distances
        # -1 0 1 2; padded and rolled they are 0 1 2 _ -1, and repeated and read in fours:
        #     0 1 2 _ -1 0 1 2 _ -1  ->  0 1 2 _ / -1 0 1 2
        # (`unfold` is slower forward and backward, and XLA does not support it.)
        ring = F.pad(by_distance, (0, 1)).roll(1 - queries, 1)
        rows = ring[:, None].expand(-1, queries, -1).flatten(1)[:, : queries * by_distance.shape[1]]
        bias = rows.view(1, len(by_distance), queries, -1)[..., :keys]
        return bias.contiguous() if mask is None else torch.where(mask, bias, float("-inf"))

    def by_distance(self, queries: int, keys: int, before: int = 0) -> Tensor:
        """The bias of each distance: [H, T + S - 1], in the precision of matrix products.

        Element j - i + T - 1 is the bias of query i and key j; see `forward`.
        """
        distance = torch.arange(1 - queries - before, keys - before, device=self.weight.device)
        bias = F.embedding(self._bucket(distance), self.weight).T
        dtype = autocast_dtype(bias.device)
        return bias if dtype is None else bias.to(dtype)

    def _bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (key position minus query position): int64 [N]."""
        count = self.weight.shape[0]
        first = torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        bucket = distance.clamp(max=exact)
        for bound in _bounds(exact, count, self.max_distance):
            bucket = bucket + (distance >= bound)
        return first + bucket
