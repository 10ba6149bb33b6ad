"""Digests of whole tensors, the same however a tensor is partitioned.

The bits of an element are an integer. The digest of a tensor is

    sum over elements i of  bits(i) * factor(i)  modulo 2^64,    factor(i) = (i * c) | 1

with i counted in the flattened whole tensor. Factors are odd, so a change of one element always
changes the digest. A rank adds up its own elements, in any order, and ranks add up their sums:

    [5 6 7 8]   rank 0: 5 f(0) + 6 f(1)   rank 1: 7 f(2) + 8 f(3)

It finds errors of hardware and software; it is not cryptographic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.hashing import hexadecimal
from trainer.accelerators import kernels
from trainer.partition import flat_start, local_parts, shard_group

_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # 2^64 divided by the golden ratio, as int64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_ELEMENTS = 2**24  # whose products are held in memory at once, 128 MiB


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each whole tensor, by name: 16 hexadecimal digits. Collective.

    The host waits for the device. One all-reduce for each group of ranks that holds partitions.

    Args:
        tensors: plain, DTensors or segments; this process's partition of each.
    """
    if not tensors:
        return {}
    own = [_local_digest(tensor) for tensor in tensors.values()]
    sums = torch.stack([each.to(own[0].device) for each in own])  # ZeRO may offload some
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, tensor in enumerate(tensors.values()):
        if (group := shard_group(tensor)) is not None:
            groups.setdefault(group, []).append(index)
    for group, members in groups.items():
        part = sums[members]
        dist.all_reduce(part, group=group)
        sums[members] = part
    return dict(zip(tensors, map(hexadecimal, sums.tolist()), strict=True))


def _local_digest(tensor: Tensor) -> Tensor:
    """The sum over the elements of the local part, int64."""
    (part,), start = local_parts([tensor]), flat_start(tensor)
    bits = part.detach().reshape(-1).view(_BITS[part.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    # A CPU's blocks stay in its cache.
    for block in torch.split(bits, kernels.block_size(part.device) or _MOST_ELEMENTS):
        factors = torch.arange(start, start + len(block), device=part.device)
        total += (factors.mul_(_FACTOR).bitwise_or_(1) * block).sum()
        start += len(block)
    return total
