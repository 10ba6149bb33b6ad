"""Checks of the collectives that training uses, with integers whose sums are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.findings import Finding
from trainer.inspect.certify.ranks import Ranks

_SIZES = (1, 1000, 2**20 + 3)  # elements of a rank
_DTYPES = (torch.float32, torch.float64, torch.int64)

Collective: TypeAlias = Callable[[list[Tensor], int, torch.device], tuple[Tensor, Tensor]]
"""(values of all ranks on the host, rank, device) -> what the rank gets, and what it should."""


def check(device: torch.device, ranks: Ranks) -> Iterator[Finding]:
    """Runs each collective in several sizes and dtypes."""
    for name, collective in _COLLECTIVES.items():
        wrong = ""
        for dtype in _DTYPES:
            for size in _SIZES:
                text = _difference(collective, device, ranks, size, dtype)
                wrong = wrong or text
        sizes = ", ".join(f"{size:,}" for size in _SIZES)
        sound = f"{len(ranks.nodes)} ranks, {sizes} elements of 3 dtypes"
        fix = "test the links between these devices, and their drivers"
        yield ranks.verdict(name, wrong, sound, fix)


def _difference(
    collective: Collective, device: torch.device, ranks: Ranks, size: int, dtype: torch.dtype
) -> str:
    """What this rank gets wrong; empty for nothing."""
    count = len(ranks.nodes)
    # Different on each rank and at each place, and small, so that sums of 2^17 ranks are exact.
    places = torch.arange(size * count)
    values = [((places * 31 + rank * 17) % 127 - 60).to(dtype) for rank in range(count)]
    found, expected = collective(values, ranks.rank, device)
    different = (found.cpu() != expected).nonzero().flatten()
    if not len(different):
        return ""
    first = int(different[0])
    return (
        f"{len(different)} of {expected.numel():,} elements of {str(dtype).removeprefix('torch.')}"
        f" are wrong; element {first} is {found[first].item()} instead of {expected[first].item()}"
    )


def _all_reduce(values: list[Tensor], rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    expected = torch.stack(values).sum(0)
    found = values[rank].to(device)
    dist.all_reduce(found)
    return found, expected


def _reduce_scatter(values: list[Tensor], rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    expected = torch.stack(values).sum(0).chunk(len(values))[rank]
    found = torch.empty_like(expected, device=device)
    dist.reduce_scatter_tensor(found, values[rank].to(device))
    return found, expected


def _all_gather(values: list[Tensor], rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    parts = [value.chunk(len(values))[index] for index, value in enumerate(values)]
    expected = torch.cat(parts)
    found = torch.empty_like(expected, device=device)
    dist.all_gather_into_tensor(found, parts[rank].to(device))
    return found, expected


def _broadcast(values: list[Tensor], rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    last = len(values) - 1
    found = values[rank].to(device, copy=True)
    dist.broadcast(found, last)
    return found, values[last]


_COLLECTIVES: Mapping[str, Collective] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "broadcast": _broadcast,
}
