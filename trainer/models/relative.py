"""T5's relative positions (Raffel et al.

2020, section 2.1): a learned bias of the attention scores by distance.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.accelerators.kernels import autocast_dtype


class RelativeBias(nn.Module):
    """One bias for each head and bucket of distances, shared by the layers of a stack.

    Half of the buckets are for one distance each, the others for ranges that grow up to
    `max_distance`, and the last one for all beyond (`_relative_position_bucket` of
    mesh-tensorflow). `bidirectional` gives half of them to cells after the one that attends;
    otherwise these share the bucket of distance 0.
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def forward(self, queries: int, keys: int, mask: Tensor | None, before: int = 0) -> Tensor:
        """The scores to add for `queries` cells that come after `before` others, and for `keys`
        cells from the first.

        A distance between cells is one between positions as long as both are in one segment, and
        others are masked.

        Args:
            queries, keys: T, S.
            mask: bool, broadcasts to [B, 1, T, S]; False becomes minus infinity. None masks
                nothing.
            before: cells before the first query.

        Returns:
            [B, H, T, S], or [1, H, T, S] without a batch in the mask, in the precision of matrix
            products.
        """
        distance = torch.arange(1 - queries - before, keys - before, device=self.weight.device)
        by_distance = F.embedding(self._bucket(distance), self.weight).T  # [H, T + S - 1]
        if (dtype := autocast_dtype(by_distance.device)) is not None:
            by_distance = by_distance.to(dtype)
        # Each row is the one above, moved by one: so are rows of n cells that are read as rows of n
        # - 1. (`unfold` says the same, takes longer forwards and backwards together, and is not
        # known to XLA.)
        ring = F.pad(by_distance, (0, 1)).roll(1 - queries, 1)
        rows = ring[:, None].expand(-1, queries, -1).flatten(1)[:, : queries * len(distance)]
        bias = rows.view(1, len(by_distance), queries, -1)[..., :keys]
        return bias.contiguous() if mask is None else torch.where(mask, bias, float("-inf"))

    def _bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance from the cell that attends to the cell attended to.

        Int64 [N] -> int64 [N].
        """
        count = self.weight.shape[0]
        first = torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        # 0 is never looked up here, and its logarithm would be no number.
        growth = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = exact + (growth * (count - exact)).long()
        return first + torch.where(distance < exact, distance, far.clamp(max=count - 1))
