"""Tensors that are split over processes, as DTensors or segments, or stacked: the part here, norms of the whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.accelerators import kernels

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LONG = 2**16  # elements, more than a bias has


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor.

    torch.distributed.tensor takes as long to import as half of torch, and `samestep config` has no
    use for it. Before it is imported no tensor can be a DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Segment:
    """A flat range of a tensor, which one process holds, as ZeRO cuts tensors: anywhere, in the middle of a row, too.

    Attributes:
        shape: of the whole tensor.
        start: where in the flattened whole the range begins.
        group: whose processes hold the ranges of the tensor, each another one.
    """

    shape: tuple[int, ...]
    start: int
    group: dist.ProcessGroup


class SegmentParameter(nn.Parameter):
    """The elements [start, start + numel) of a flattened parameter, [numel]. There may be none.

    It shares the memory of `data`. What torch computes from it is a plain tensor; `state_like` says of one that it
    lies in the same place.

    Attributes:
        segment: where it lies in the whole parameter.
    """

    segment: Segment

    def __new__(
        cls, data: Tensor, segment: Segment, requires_grad: bool = True
    ) -> SegmentParameter:
        assert data.ndim == 1, f"{list(data.shape)} is not flat"
        assert 0 <= segment.start <= math.prod(segment.shape) - len(data), (
            f"{len(data)} elements do not fit {segment}"
        )
        parameter = super().__new__(cls, data, requires_grad)
        parameter.segment = segment
        return parameter

    def detach(self) -> SegmentParameter:
        """The same elements, in the same place."""
        return SegmentParameter(super().detach(), self.segment, requires_grad=False)


class StackedParameter(nn.Parameter):
    """Equal parameters of several layers as one tensor, [layers, ...]; the optimizer updates each as it would alone.

    What torch computes from it is a plain tensor.

    Attributes:
        members: the names of the parameters.
    """

    members: tuple[str, ...]

    def __new__(
        cls, data: Tensor, names: tuple[str, ...], requires_grad: bool = True
    ) -> StackedParameter:
        assert len(data) == len(names), f"{list(data.shape)} for {len(names)} names"
        parameter = super().__new__(cls, data, requires_grad)
        parameter.members = names
        return parameter

    def detach(self) -> StackedParameter:
        """The same elements, of the same names."""
        return StackedParameter(super().detach(), self.members, requires_grad=False)


def state_like(tensor: Tensor, parameter: Tensor, whole: bool = False) -> Tensor:
    """A local tensor of the optimizer's state, described as its parameter is; itself if that is plain or a DTensor.

    Args:
        tensor: a segment of the place where the parameter lies, or a stack as that is.
        parameter: what it is the state of.
        whole: whether every process has all of it, and no segment.
    """
    if isinstance(parameter, StackedParameter):
        return StackedParameter(tensor.detach(), parameter.members, requires_grad=False)
    if isinstance(parameter, SegmentParameter) and not whole:
        return SegmentParameter(tensor.detach(), parameter.segment, requires_grad=False)
    return tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor, whatever this process holds of it."""
    return tensor.segment.shape if isinstance(tensor, SegmentParameter) else tuple(tensor.shape)


def layer_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a whole parameter; of stacked ones that of each."""
    return whole_shape(tensor)[1:] if isinstance(tensor, StackedParameter) else whole_shape(tensor)


@torch.no_grad()
def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of tensors that this process holds, as plain tensors: their own memory, to be changed in place."""
    return [_local(tensor) for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor.as_subclass(Tensor) if isinstance(tensor, SegmentParameter) else tensor


def local_rectangles(tensor: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """What this process holds of a tensor: rectangles, and where each starts in the whole one, per dimension.

    All of a plain tensor is one, and so is the local part of a DTensor; a segment is several, or none.
    """
    if isinstance(tensor, SegmentParameter):
        return rectangles(_local(tensor), tensor.segment.start, tensor.segment.shape)
    return [(_local(tensor), _offset(tensor))]


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """Where the local part of a tensor that is no segment starts in the whole one, per dimension.

    For a DTensor it is computed here, by the rule of `torch.chunk` that DTensor follows; torch's own function for it is
    private and has moved between releases.
    """
    offset = [0] * tensor.ndim
    if not is_dtensor(tensor):
        return tuple(offset)
    from torch.distributed.tensor import Replicate, Shard

    shape = list(tensor.shape)
    for dimension, placement in enumerate(tensor.placements):
        assert type(placement) in (Shard, Replicate), f"{placement} is not a plain split"
        if isinstance(placement, Shard):
            length, parts = shape[placement.dim], tensor.device_mesh.size(dimension)
            chunk = -(-length // parts)
            start = min(length, chunk * tensor.device_mesh.get_local_rank(dimension))
            offset[placement.dim] += start
            shape[placement.dim] = min(chunk, length - start)
    local = tensor.to_local().shape
    assert local == tuple(shape), (
        f"{list(local)} here, {shape} by its placements {tensor.placements}"
    )
    return tuple(offset)


def flat_start(tensor: Tensor) -> int:
    """Where in the flattened whole the part of a tensor begins that this process holds; it must be one flat range."""
    if isinstance(tensor, SegmentParameter):
        return tensor.segment.start
    assert _local(tensor).shape[1:] == tensor.shape[1:], (
        "it is split over another dimension than its first"
    )
    return math.prod(tensor.shape[1:]) * next(iter(_offset(tensor)), 0)


def block_bounds(tensor: Tensor, blocks: int) -> list[int]:
    """Where, in the part that this process holds, each of `blocks` equal stacks of a tensor's rows begins, and its end.

    Block b is [bounds[b], bounds[b + 1]) of the local part's first dimension: rows, or of a segment elements. It is
    empty where the block lies with other processes.
    """
    (rows, *row), part = whole_shape(tensor), _local(tensor)
    assert rows % blocks == 0, f"{rows} rows are not {blocks} equal blocks"
    unit = math.prod(part.shape[1:])
    size, start = rows // blocks * math.prod(row) // unit, flat_start(tensor) // unit
    return [min(max(block * size - start, 0), len(part)) for block in range(blocks + 1)]


def rectangles(
    part: Tensor, start: int, shape: Sequence[int]
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Cuts a flat range of a tensor of n dimensions into rectangles of it: at most 2n - 1.

    Args:
        part: the elements of the flattened tensor from `start` on: [numel], or whole rows.
        start: where the range begins.
        shape: of the tensor.

    Returns:
        Views of `part` with n dimensions, and where each starts in the tensor, per dimension; in the order of memory.
    """
    found = list(_cut(tuple(shape), start, start + part.numel()))
    lengths = [math.prod(size) // math.prod(part.shape[1:]) for _, size in found]
    views = torch.split(part, lengths) if found else ()
    return [(view.view(size), offset) for view, (offset, size) in zip(views, found, strict=True)]


def _cut(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offset and size of each rectangle of [start, stop): of a row's end, whole rows, and a row's beginning."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first = min(stop, -(-start // row) * row)  # whole rows are [first, last)
    last = max(first, stop // row * row)
    for begin, end in ((start, first), (first, last), (last, stop)):
        number, count = begin // row, (end - begin) // row
        if count:
            yield (number, *[0] * len(shape[1:])), (count, *shape[1:])
        else:
            for offset, size in _cut(shape[1:], begin - number * row, end - number * row):
                yield (number, *offset), (1, *size)


@torch.no_grad()
def squared_norms(parts: list[Tensor], counts: Sequence[int] | None = None) -> Tensor:
    """The squared L2 norms of local parts: [number of parts], fp64; of a part that is a stack those of each in it.

    Args:
        parts: the tensors.
        counts: how many tensors of equal numbers of rows each part is a stack of; None: all are single ones.

    They must not depend on how a tensor is split, so squares are summed in fp64. Where that is slow,
    those of a row are summed in fp32; of a whole matrix that would be wrong by 1e-3, as torch's
    kernel adds up millions of squares one after another.
    """
    if kernels.has_fast_fp64(parts[0].device):
        assert counts is None or max(counts) == 1, "stacks are for devices that compile graphs"
        norms = [norm[None] for norm in torch._foreach_norm(parts, 2, dtype=torch.float64)]
    else:
        each = [
            _row_norms(part).view(count, -1) if count > 1 else _row_norms(part).flatten()[None]
            for part, count in zip(parts, counts or [1] * len(parts), strict=True)
        ]
        norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in each]
    return torch.cat(norms).square()


def _row_norms(part: Tensor) -> Tensor:
    """Norms of rows, or of a flat part's elements; of a long one, a segment, of 1024 elements at a time."""
    if part.ndim > 1:
        norms: Tensor = torch.linalg.vector_norm(part, dim=-1)
        return norms
    if part.numel() < _LONG:
        return part
    whole = len(part) // 1024 * 1024
    return torch.cat((_row_norms(part[:whole].view(-1, 1024)), part[whole:]))


def add_up(values: Tensor, like: Tensor) -> Tensor:
    """Adds up numbers, in place, over the processes that a tensor is split over; one collective.

    Args:
        values: this process's numbers, of local parts.
        like: a tensor that is split as those are; of one that is not split the numbers are whole already.

    Returns:
        `values`, now equal in all processes.
    """
    if isinstance(like, SegmentParameter):
        dist.all_reduce(values, group=like.segment.group)
    elif is_dtensor(like):
        for dimension, placement in enumerate(like.placements):
            if placement.is_shard():
                dist.all_reduce(values, group=like.device_mesh.get_group(dimension))
    return values


def whole_norms(
    tensors: Iterable[Tensor], like: Tensor, counts: Sequence[int] | None = None
) -> Tensor:
    """The L2 norms of whole tensors, with one collective for all of them.

    Args:
        tensors: DTensors or local parts, all of them split alike.
        like: a tensor that is split as those are.
        counts: as of `squared_norms`.

    Returns:
        [number of tensors], fp64.
    """
    return add_up(squared_norms(local_parts(tensors), counts), like).sqrt()
