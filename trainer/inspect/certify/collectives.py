"""Checks of the collectives that training uses, with exact sums of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.findings import Finding
from trainer.inspect.certify.ranks import Ranks

_SIZES = (1, 1000, 2**20 + 3)  # elements of a rank
_DTYPES = (torch.float32, torch.float64, torch.int64)
_PERIOD = 127  # elements of a rank, after which its values repeat


@dataclass(frozen=True)
class _Case:
    """The values of all ranks in one call of a collective: `size` x `ranks` elements of each rank.

    Each follows from its rank and place, so no rank stores the values of all others: with 32 ranks
    these are 32 x 32 x 8 MiB.
    """

    rank: int
    ranks: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def values(self, rank: int, first: int, end: int) -> Tensor:
        """The elements [first, end) of a rank, on the host."""
        # Different on each rank and at each place, and small, so that sums of 2^17 ranks are exact.
        places = torch.arange(first, end)
        return places.mul_(31).add_(rank * 17).remainder_(_PERIOD).sub_(60).to(self.dtype)

    def sums(self, first: int, end: int) -> Tensor:
        """The elements [first, end) of the sum over all ranks, on the host."""
        period = torch.zeros(_PERIOD, dtype=self.dtype)
        for rank in range(self.ranks):
            period += self.values(rank, 0, _PERIOD)
        return period[torch.arange(first, end).remainder_(_PERIOD)]

    @property
    def elements(self) -> int:
        """Of each rank."""
        return self.size * self.ranks

    def part(self, rank: int) -> tuple[int, int]:
        """The first element of a rank's part of all elements, and the one after its last."""
        return rank * self.size, (rank + 1) * self.size


Collective: TypeAlias = Callable[[_Case], tuple[Tensor, Tensor]]
"""What a rank gets, and what it should."""


def check(device: torch.device, ranks: Ranks) -> Iterator[Finding]:
    """Runs each collective in several sizes and dtypes."""
    for name, collective in _COLLECTIVES.items():
        wrong = ""
        for dtype in _DTYPES:
            for size in _SIZES:
                case = _Case(ranks.rank, len(ranks.nodes), size, dtype, device)
                text = _difference(*collective(case))
                wrong = wrong or text
        sizes = ", ".join(f"{size:,}" for size in _SIZES)
        sound = f"{len(ranks.nodes)} ranks, {sizes} elements of 3 dtypes"
        fix = "test the links between these devices, and their drivers"
        yield ranks.verdict(name, wrong, sound, fix)


def _difference(found: Tensor, expected: Tensor) -> str:
    """Describes the elements that this rank gets wrong; empty if there are none."""
    different = (found.cpu() != expected).nonzero().flatten()
    if not len(different):
        return ""
    first = int(different[0])
    return (
        f"{len(different)} of {expected.numel():,} elements of "
        f"{str(expected.dtype).removeprefix('torch.')} are wrong; element {first} is "
        f"{found[first].item()} instead of {expected[first].item()}"
    )


def _all_reduce(case: _Case) -> tuple[Tensor, Tensor]:
    found = case.values(case.rank, 0, case.elements).to(case.device)
    dist.all_reduce(found)
    return found, case.sums(0, case.elements)


def _reduce_scatter(case: _Case) -> tuple[Tensor, Tensor]:
    expected = case.sums(*case.part(case.rank))
    found = torch.empty_like(expected, device=case.device)
    own = case.values(case.rank, 0, case.elements)
    dist.reduce_scatter_tensor(found, own.to(case.device))
    return found, expected


def _all_gather(case: _Case) -> tuple[Tensor, Tensor]:
    parts = [case.values(rank, *case.part(rank)) for rank in range(case.ranks)]
    expected = torch.cat(parts)
    found = torch.empty_like(expected, device=case.device)
    dist.all_gather_into_tensor(found, parts[case.rank].to(case.device))
    return found, expected


def _broadcast(case: _Case) -> tuple[Tensor, Tensor]:
    last = case.ranks - 1
    found = case.values(case.rank, 0, case.elements).to(case.device)
    dist.broadcast(found, last)
    return found, case.values(last, 0, case.elements)


_COLLECTIVES: Mapping[str, Collective] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
}
