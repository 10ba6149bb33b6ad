"""Whole matrices of partitioned parameters, each on one rank.

An update that needs whole matrices would be computed by every rank if all gathered all of them.
Here each matrix has an owner. The ranks send their parts to the owners, which compute, and get
their parts of the results back: two all-to-alls a step, in which each element moves at most twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.partition import flat_start, local_parts, shard_group

Range = tuple[int, int]
"""Elements [first, end) of a flattened matrix."""


class Exchange:
    """Moves matrices to their owners and back. Created and used by all ranks together.

    Args:
        weights: parameters with the same kind of partition.
        shapes: (number of matrices in its rows, rows of each, columns) of each parameter.
    """

    def __init__(self, weights: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]]) -> None:
        self._group = shard_group(weights[0])
        self._shapes = [(rows, columns) for count, rows, columns in shapes for _ in range(count)]
        own: list[Range] = []
        for weight, part, (count, rows, columns) in zip(
            weights, local_parts(weights), shapes, strict=True
        ):
            first, size = flat_start(weight), rows * columns
            for start in range(0, count * size, size):
                # The overlap of this rank's elements with those of the matrix, counted from its
                # first: of elements 4 to 8, a matrix that begins at 6 has the range (0, 2).
                edges = (first - start, first + part.numel() - start)
                begin, end = (min(max(edge, 0), size) for edge in edges)
                own.append((begin, max(begin, end)))
        # The other ranks' ranges follow from no rule that all strategies share, so they are asked
        # for, once.
        ranges: list[list[Range]] = [own]
        self._rank = 0
        if self._group is not None:
            self._rank = dist.get_rank(self._group)
            ranges = [own] * dist.get_world_size(self._group)
            dist.all_gather_object(ranges, own, group=self._group)
        self._sizes = [[end - begin for begin, end in each] for each in ranges]
        # The ranks in the order of their elements, for each matrix: joined in this order, their
        # parts are the flattened matrix. Empty parts may stand anywhere.
        self._order = [
            sorted(range(len(ranges)), key=lambda rank: ranges[rank][matrix])
            for matrix in range(len(own))
        ]
        # Newton-Schulz iterations cost about as much as this product; memory goes with it.
        costs = [rows * columns * min(rows, columns) for rows, columns in self._shapes]
        self._owners = owners(costs, len(ranges))
        self._mine = [i for i, owner in enumerate(self._owners) if owner == self._rank]

    def collect(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the whole matrices that this rank owns, by number.

        Args:
            parts: this rank's elements of each matrix.
        """
        if self._group is None:
            return {i: each.reshape(self._shapes[i]) for i, each in enumerate(parts)}
        # One message to each owner: its matrices in their order.
        sent = [parts[i].reshape(-1) for i in self._by_owner()]
        received = self._swap(sent, self._sizes[self._rank], to_owners=True)
        pieces = {rank: iter(self._split(received, rank)) for rank in range(len(self._sizes))}
        found = {i: {rank: next(pieces[rank]) for rank in pieces} for i in self._mine}
        return {
            i: torch.cat([each[rank] for rank in self._order[i]]).view(self._shapes[i])
            for i, each in found.items()
        }

    def spread(self, matrices: Mapping[int, Tensor]) -> list[Tensor]:
        """Returns this rank's elements of all matrices, flat.

        Args:
            matrices: those that this rank owns, by number.
        """
        if self._group is None:
            return [matrices[i].reshape(-1) for i in range(len(self._shapes))]
        pieces: dict[int, dict[int, Tensor]] = {}
        for i in self._mine:
            sizes = [self._sizes[rank][i] for rank in self._order[i]]
            split = torch.split(matrices[i].reshape(-1), sizes)
            pieces[i] = dict(zip(self._order[i], split, strict=True))
        sent = [pieces[i][rank] for rank in range(len(self._sizes)) for i in self._mine]
        received = self._swap(sent, self._sizes[self._rank], to_owners=False)
        numbers = self._by_owner()
        split = torch.split(received, [self._sizes[self._rank][i] for i in numbers])
        found = dict(zip(numbers, split, strict=True))
        return [found[i] for i in range(len(numbers))]

    def _by_owner(self) -> list[int]:
        """The matrices in the order in which their parts are sent: by owner, then by number."""
        return sorted(range(len(self._owners)), key=lambda i: (self._owners[i], i))

    def _swap(self, sent: list[Tensor], own: Sequence[int], to_owners: bool) -> Tensor:
        """One all-to-all; returns what the other ranks sent, by rank."""
        ranks = range(len(self._sizes))
        # Every rank knows all sizes, so none are sent. Elements between this rank and each: its own parts of their matrices, and their parts of
        # its own.
        own_parts = [
            sum(own[i] for i, owner in enumerate(self._owners) if owner == rank) for rank in ranks
        ]
        their_parts = [sum(self._sizes[rank][i] for i in self._mine) for rank in ranks]
        out, back = (own_parts, their_parts) if to_owners else (their_parts, own_parts)
        message = torch.cat(sent) if sent else torch.empty(0)
        received = message.new_empty(sum(back))
        dist.all_to_all_single(received, message, back, out, group=self._group)
        return received

    def _split(self, received: Tensor, rank: int) -> Sequence[Tensor]:
        """What one rank sent of this rank's matrices, in their order."""
        sizes = [[each[i] for i in self._mine] for each in self._sizes]
        before = sum(sum(each) for each in sizes[:rank])
        return torch.split(received[before : before + sum(sizes[rank])], sizes[rank])


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Assigns matrices to ranks, so that the ranks have about the same cost.

    The most expensive matrix first, each to the rank with the least so far: costs 8, 5, 4, 1 on two
    ranks go to the ranks 0, 1, 1, 0.
    """
    load = [(0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(load)
        found[i] = rank
        heapq.heappush(load, (total + costs[i], rank))
    return found
