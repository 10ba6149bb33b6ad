"""The sizes of tiles that the attention kernels compute at a time."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Launch parameters of a kernel.

    Attributes:
        queries, keys: of a tile of scores.
        warps: of a program.
        stages: blocks in flight while the loop computes.
        registers: the most of a thread, fewer than the compiler would take; None: as it chooses.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


class Plan(NamedTuple):
    """Launch parameters of the three kernels that have tiles.

    Attributes:
        forward: its output accumulator has queries x K numbers.
        query_gradient: square, which the gradient of the bias relies on.
        key_gradient: its two accumulators have keys x K numbers.
    """

    forward: Blocks
    query_gradient: Blocks
    key_gradient: Blocks


def choose_plan(width: int, dtype: torch.dtype, generation: str) -> Plan:
    """Launch parameters for a head width on a generation of GPUs ("hopper", "amd" or "other").

    Chosen from compiled code, not from timings: the largest tiles with which no kernel in half
    precision spills more than 16 bytes of registers (tests/kernels/test_code.py). On Ampere, Ada
    and the GPUs of workstations all fit into their 99 KB of shared memory.
    """
    narrow = width <= 64
    if dtype == torch.float32:
        # Products in fp32 have no tensor cores, and need many registers.
        edge = 32 if narrow else 16
        return Plan(Blocks(32, 32, 8, 1), Blocks(edge, edge, 8, 1), Blocks(edge, edge, 8, 1))
    if generation == "amd":
        return Plan(*[Blocks(64, 64, 4, 1)] * 3)
    forward = Blocks(128, 64, 8, 2)
    if not narrow:
        return Plan(forward, Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 2))
    if generation == "hopper":
        # One warpgroup issues wgmma of 64 rows; of two, each would have half of the columns.
        # With 128 registers, two programs of the forward pass fit on a multiprocessor: one computes
        # exponentials while the other multiplies. All variants fit without spills.
        forward = forward._replace(registers=128)
        return Plan(forward, Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2))
    return Plan(forward, Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2))


@functools.cache
def generation_of(device: torch.device) -> str:
    """The generation of a GPU, for `choose_plan`."""
    if torch.version.hip is not None:
        return "amd"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return "hopper" if hopper else "other"
