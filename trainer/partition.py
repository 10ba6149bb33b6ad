"""Tensors that are split over processes: which part this one holds, and norms of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a tensor that this process holds, and where it starts in the whole one, per dimension.

    All of a plain tensor; of a DTensor the local part. Its place is computed here, by the rule of `torch.chunk` that
    DTensor follows; torch's own function for it is private and has moved between releases.
    """
    offset = [0] * tensor.ndim
    if not isinstance(tensor, DTensor):
        return tensor, tuple(offset)
    shape = list(tensor.shape)
    for dimension, placement in enumerate(tensor.placements):
        assert type(placement) in (Shard, Replicate), f"{placement} is not a plain split"
        if isinstance(placement, Shard):
            length, parts = shape[placement.dim], tensor.device_mesh.size(dimension)
            chunk = -(-length // parts)
            start = min(length, chunk * tensor.device_mesh.get_local_rank(dimension))
            offset[placement.dim] += start
            shape[placement.dim] = min(chunk, length - start)
    local = tensor.to_local()
    assert local.shape == tuple(shape), f"{list(local.shape)} here, {shape} by its placements {tensor.placements}"
    return local, tuple(offset)


@torch.no_grad()
def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of tensors that this process holds: their own memory, to be changed in place."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def row_bounds(tensor: Tensor, blocks: int) -> list[int]:
    """Where, in the part that this process holds, each of `blocks` equal stacks of a tensor's rows begins, and its end.

    Block b is rows [bounds[b], bounds[b + 1]) of the local part: none where it lies with other processes.
    """
    local, offset = local_part(tensor)
    rows = tensor.shape[0] // blocks
    assert rows * blocks == tensor.shape[0], f"{tensor.shape[0]} rows are not {blocks} equal blocks"
    return [min(max(block * rows - offset[0], 0), len(local)) for block in range(blocks + 1)]


@torch.no_grad()
def squared_norms(parts: list[Tensor]) -> Tensor:
    """The squared L2 norms of local parts: [number of parts], fp64.

    They must not depend on how a tensor is split, so squares are summed in fp64. On the CPU those of a row are summed
    in fp32, which is 10 times as fast; of a whole matrix that would be wrong by 1e-3, as torch's kernel adds up
    millions of squares one after another.
    """
    if parts[0].device.type == "cpu":
        rows = [torch.linalg.vector_norm(part, dim=-1) if part.ndim > 1 else part for part in parts]
        norms = [torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows]
    else:
        norms = list(torch._foreach_norm(parts, 2, dtype=torch.float64))
    return torch.stack(norms).square()


def add_up(values: Tensor, like: Tensor) -> Tensor:
    """Adds up numbers, in place, over the processes that a tensor is split over; one collective.

    Args:
        values: this process's numbers, of local parts.
        like: a tensor that is split as those are; of one that is not split the numbers are whole already.

    Returns:
        `values`, now equal in all processes.
    """
    if isinstance(like, DTensor):
        for dimension, placement in enumerate(like.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(values, group=like.device_mesh.get_group(dimension))
    return values


def whole_norms(tensors: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
    """The L2 norms of whole tensors, with one collective for all of them.

    Args:
        tensors: DTensors or local parts, all of them split alike.
        like: a tensor that says how; None asks the first of them.

    Returns:
        [number of tensors], fp64.
    """
    return add_up(squared_norms(local_parts(tensors)), tensors[0] if like is None else like).sqrt()
