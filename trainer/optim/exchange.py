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
        (self._like,) = local_parts(weights[:1])
        self._shapes = [(rows, columns) for count, rows, columns in shapes for _ in range(count)]
        own: list[Range] = []
        for weight, part, (count, rows, columns) in zip(
            weights, local_parts(weights), shapes, strict=True
        ):
            first, size = flat_start(weight), rows * columns
            for start in range(0, count * size, size):
                # The overlap of this rank's elements with the matrix's, counted from its
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
        costs = [rows * columns * min(rows, columns) for rows, columns in self._shapes]
        # Newton-Schulz iterations cost about as much as this product; memory goes with it.
        owner_of = owners(costs, len(ranges))
        self._mine = [i for i, owner in enumerate(owner_of) if owner == self._rank]
        # The ranks in the order of their elements, for each of this rank's matrices: joined in this
        # order, their parts are the flattened matrix. Empty parts may stand anywhere.
        self._order = {i: _in_order([each[i] for each in ranges]) for i in self._mine}
        # What is sent and received never changes, so it is counted once: at a thousand ranks,
        # counting takes longer than a step may.
        self._by_owner = sorted(range(len(own)), key=lambda i: (owner_of[i], i))
        self._own_sizes = [own[i][1] - own[i][0] for i in self._by_owner]
        self._to_owners = [0] * len(ranges)
        for i, size in zip(self._by_owner, self._own_sizes, strict=True):
            self._to_owners[owner_of[i]] += size
        self._their_sizes = [[each[i][1] - each[i][0] for i in self._mine] for each in ranges]
        self._from_ranks = [sum(sizes) for sizes in self._their_sizes]

    def collect(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the whole matrices that this rank owns, by number.

        Args:
            parts: this rank's elements of each matrix.
        """
        if self._group is None:
            return {i: each.reshape(self._shapes[i]) for i, each in enumerate(parts)}
        # One message to each owner: its matrices in their order.
        message = torch.cat([parts[i].reshape(-1) for i in self._by_owner])
        received = self._swap(message, self._to_owners, self._from_ranks)
        # By rank, and within a rank by matrix.
        pieces = torch.split(received, [size for each in self._their_sizes for size in each])
        count = len(self._mine)
        return {
            number: torch.cat([pieces[rank * count + i] for rank in self._order[number]]).view(
                self._shapes[number]
            )
            for i, number in enumerate(self._mine)
        }

    def spread(self, matrices: Mapping[int, Tensor]) -> list[Tensor]:
        """Returns this rank's elements of all matrices, flat.

        Args:
            matrices: those that this rank owns, by number.
        """
        if self._group is None:
            return [matrices[i].reshape(-1) for i in range(len(self._shapes))]
        pieces: list[dict[int, Tensor]] = []
        for i, number in enumerate(self._mine):
            order = self._order[number]
            sizes = [self._their_sizes[rank][i] for rank in order]
            split = torch.split(matrices[number].reshape(-1), sizes)
            pieces.append(dict(zip(order, split, strict=True)))
        sent = [each[rank] for rank in range(len(self._their_sizes)) for each in pieces]
        # A rank without matrices sends nothing, in the type of the others.
        message = torch.cat(sent) if sent else self._like.new_empty(0)
        received = self._swap(message, self._from_ranks, self._to_owners)
        found = dict(zip(self._by_owner, torch.split(received, self._own_sizes), strict=True))
        return [found[i] for i in range(len(found))]

    def _swap(self, message: Tensor, out: list[int], back: list[int]) -> Tensor:
        """One all-to-all.

        Args:
            message: to all ranks, in their order.
            out, back: number of elements to and from each rank.
        """
        received = message.new_empty(sum(back))
        dist.all_to_all_single(received, message, back, out, group=self._group)
        return received


def _in_order(ranges: Sequence[Range]) -> list[int]:
    """The indices of the ranges, sorted."""
    return sorted(range(len(ranges)), key=ranges.__getitem__)


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
