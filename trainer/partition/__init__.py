"""Tensors partitioned over ranks: where the local part lies in the whole, and norms of the whole.

A tensor is partitioned in one of two ways, and optimizers and checkpoints treat both alike:

    DTensor           FSDP2 splits the first dimension by the rule of torch.chunk.
    SegmentParameter  ZeRO splits the flattened tensor anywhere, also in the middle of a row.

For example, a parameter of 5 rows and 3 columns on 2 ranks:

    DTensor    rank 0: rows 0 to 2     rank 1: rows 3 and 4
    segment    rank 0: elements 0 to 7 (rows 0 and 1, and columns 0 and 1 of row 2)
               rank 1: elements 8 to 14 (column 2 of row 2, and rows 3 and 4)

A StackedParameter is not partitioned: it holds the equal parameters of several layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.accelerators import kernels

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LONG = 2**16  # elements; shorter flat parts are summed in fp64 directly
_MOST_ELEMENTS = 2**33  # of a whole tensor, whose squares are summed exactly


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor.

    torch.distributed.tensor takes as long to import as half of torch, and `samestep config` has no
    use for it. Before it is imported no tensor can be a DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True)
class Segment:
    """A flat range of a tensor.

    Attributes:
        shape: of the whole tensor.
        start: first element of the range in the flattened tensor.
        group: the ranks that hold the ranges of the tensor.
    """

    shape: tuple[int, ...]
    start: int
    group: dist.ProcessGroup


class SegmentParameter(nn.Parameter):
    """The elements [start, start + numel) of a flattened parameter, [numel]; may be empty.

    It shares the memory of `data`. Results of torch operations on it are plain tensors;
    `state_like` marks a result as the same range.

    Attributes:
        segment: the range in the whole parameter.
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
        """Returns the same elements, as the same range."""
        return SegmentParameter(super().detach(), self.segment, requires_grad=False)


class StackedParameter(nn.Parameter):
    """Equal parameters of several layers as one tensor, [layers, ...].

    Optimizers update each layer as they would update it alone. Results of torch operations on it
    are plain tensors.

    Attributes:
        members: names of the parameters.
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
        """Returns the same elements, with the same names."""
        return StackedParameter(super().detach(), self.members, requires_grad=False)


def state_like(tensor: Tensor, parameter: Tensor, whole: bool = False) -> Tensor:
    """Marks a local tensor of the optimizer's state as partitioned like its parameter.

    Args:
        tensor: the state of the local part.
        parameter: its parameter.
        whole: every rank has the whole state, so it is not a segment.

    Returns:
        A segment or a stack; `tensor` itself if the parameter is plain or a DTensor, or if `whole`
        is set.
    """
    if isinstance(parameter, StackedParameter):
        return StackedParameter(tensor.detach(), parameter.members, requires_grad=False)
    if isinstance(parameter, SegmentParameter) and not whole:
        return SegmentParameter(tensor.detach(), parameter.segment, requires_grad=False)
    return tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole tensor, however it is partitioned."""
    return tensor.segment.shape if isinstance(tensor, SegmentParameter) else tuple(tensor.shape)


def layer_shape(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of a whole parameter; of a stack, the shape of each layer."""
    return whole_shape(tensor)[1:] if isinstance(tensor, StackedParameter) else whole_shape(tensor)


@torch.no_grad()
def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the local parts as plain tensors that share their memory."""
    return [_local(tensor) for tensor in tensors]


def _local(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor:  # most gradients: the checks below take longer
        return tensor
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor.as_subclass(Tensor) if isinstance(tensor, SegmentParameter) else tensor


def local_rectangles(tensor: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Returns the local part as rectangles, and the offset of each in the whole tensor.

    A plain tensor and the local part of a DTensor are one rectangle. A segment is several, or none:
    in the module's example, rank 0 holds rectangles of 2 x 3 at (0, 0) and 1 x 2 at (2, 0).
    """
    if isinstance(tensor, SegmentParameter):
        return rectangles(_local(tensor), tensor.segment.start, tensor.segment.shape)
    return [(_local(tensor), _offset(tensor))]


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """The offset of the local part of a plain tensor or DTensor, per dimension.

    torch's own function for this is private and has moved between releases.
    """
    offset = [0] * tensor.ndim
    if not is_dtensor(tensor):
        return tuple(offset)
    from torch.distributed.tensor import Replicate, Shard

    shape = list(tensor.shape)
    for dimension, placement in enumerate(tensor.placements):
        assert type(placement) in (Shard, Replicate), f"{placement} is not a plain split"
        if isinstance(placement, Shard):
            # torch.chunk: equal chunks of ceil(length / ranks), the last ones shorter or empty.
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
    """Returns the first element of the local part in the flattened tensor.

    The local part must be one flat range.
    """
    if isinstance(tensor, SegmentParameter):
        return tensor.segment.start
    assert _local(tensor).shape[1:] == tensor.shape[1:], (
        "it is split over another dimension than its first"
    )
    return math.prod(tensor.shape[1:]) * next(iter(_offset(tensor)), 0)


def block_bounds(tensor: Tensor, blocks: int) -> list[int]:
    """Splits a tensor's rows into equal blocks; returns the bounds of the blocks in the local part.

    Block b is [bounds[b], bounds[b + 1]) of the local part's first dimension, which is rows, or
    elements of a segment. It is empty if other ranks hold the block. For example, 6 rows in 3
    blocks, of which this rank holds rows 3 to 5, have the bounds 0, 0, 1, 3.
    """
    (rows, *row), part = whole_shape(tensor), _local(tensor)
    assert rows % blocks == 0, f"{rows} rows are not {blocks} equal blocks"
    # A segment is one-dimensional, so its unit is an element; otherwise the unit is a row.
    unit = math.prod(part.shape[1:])  # elements of one index of the local part
    size, start = rows // blocks * math.prod(row) // unit, flat_start(tensor) // unit
    return [min(max(block * size - start, 0), len(part)) for block in range(blocks + 1)]


def rectangles(
    part: Tensor, start: int, shape: Sequence[int]
) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Splits a flat range of a tensor of n dimensions into at most 2n - 1 rectangles.

    Args:
        part: the elements of the flattened tensor from `start` on: [numel], or whole rows.
        start: first element of the range.
        shape: shape of the tensor.

    Returns:
        Views of `part` with n dimensions, and the offset of each in the tensor; in memory order.
    """
    # Elements 2 to 10 of a [4, 3] tensor: the end of row 0, rows 1 and 2, the start of
    # row 3, which are 1 x 1 at (0, 2), 2 x 3 at (1, 0) and 1 x 2 at (3, 0).
    found = list(_cut(tuple(shape), start, start + part.numel()))
    lengths = [math.prod(size) // math.prod(part.shape[1:]) for _, size in found]
    views = torch.split(part, lengths) if found else ()
    return [(view.view(size), offset) for view, (offset, size) in zip(views, found, strict=True)]


def _cut(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offset and size of each rectangle of the flat range [start, stop).

    The range is the end of a row, then whole rows, then the beginning of a row; each may be empty.
    The ends are ranges of a row, which has one dimension less.
    """
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
    """Returns the squared L2 norms of local parts: [sum of counts], fp64.

    Squares are summed in fp64, so that a norm depends on the partition through rounding only. Where
    fp64 is slow, rows are summed in fp32 and combined in fp64: one fp32 sum over a whole large
    matrix was off by 1e-3 on CPUs.

    Args:
        parts: the local parts.
        counts: number of equally sized matrices stacked in each part, whose norms are returned one
            by one; None: 1 each.
    """
    if kernels.has_fast_fp64(parts[0].device):
        assert counts is None or max(counts) == 1, "stacks are for devices that compile graphs"
        return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square()
    if counts is None and kernels.is_eager(parts[0].device):
        # One call for all parts: a small model's sums are faster than a call for each.
        rows = [_row_norms(part).flatten() for part in parts]
        return torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float64)).square()
    each = [
        _row_norms(part).view(count, -1) if count > 1 else _row_norms(part).flatten()[None]
        for part, count in zip(parts, counts or [1] * len(parts), strict=True)
    ]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in each]
    return torch.cat(norms).square()


def _row_norms(part: Tensor) -> Tensor:
    """Norms of rows.

    A short flat part is returned as it is; of a long one, norms of 1024 elements.
    """
    if part.ndim > 1:
        norms: Tensor = torch.linalg.vector_norm(part, dim=-1)
        return norms
    if part.numel() < _LONG:
        return part
    whole = len(part) // 1024 * 1024
    return torch.cat((_row_norms(part[:whole].view(-1, 1024)), part[whole:]))


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """Returns the ranks that a tensor is partitioned over; None if it is not.

    HSDP's replicas hold equal parts, and each has a group of its own.
    """
    if isinstance(tensor, SegmentParameter):
        return tensor.segment.group
    if is_dtensor(tensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                return tensor.device_mesh.get_group(dimension)
    return None


def add_up(values: Tensor, like: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Sums values over the ranks that a tensor is partitioned over, in place.

    One all-reduce per sharded dimension of the mesh, and one broadcast between replicas.

    Args:
        values: numbers of this rank, computed from local parts.
        like: a tensor with the same partition. If it is not partitioned, nothing is summed.
        op: of the all-reduce, if it is not a sum.
    """
    # HSDP shards over one dimension of the mesh and replicates over the other, where the values are
    # equal up to rounding: summing them there would count each once per replica.
    if isinstance(like, SegmentParameter):
        dist.all_reduce(values, op, like.segment.group)
    elif is_dtensor(like):
        for dimension, placement in enumerate(like.placements):
            if placement.is_shard() and like.device_mesh.size(dimension) > 1:
                dist.all_reduce(values, op, like.device_mesh.get_group(dimension))
        # Each replica has added up in its own group, possibly in another order. The first replica's
        # sums count for all: updates that differ in a bit would let replicas drift apart.
        for dimension, placement in enumerate(like.placements):
            if placement.is_replicate():
                dist.broadcast(values, group=like.device_mesh.get_group(dimension), group_src=0)
    return values


def whole_norms(
    tensors: Iterable[Tensor],
    like: Tensor,
    counts: Sequence[int] | None = None,
    is_exact: bool = False,
) -> Tensor:
    """Returns the L2 norms of whole tensors, fp64; see `whole_squares`."""
    return whole_squares(tensors, like, counts, is_exact).sqrt()


def whole_squares(
    tensors: Iterable[Tensor],
    like: Tensor,
    counts: Sequence[int] | None = None,
    is_exact: bool = False,
) -> Tensor:
    """Returns squared L2 norms of whole tensors, fp64; one all-reduce per sharded mesh dimension.

    The result has one number per tensor, or `sum(counts)` with counts.

    Args:
        tensors: DTensors or local parts, all with the same partition.
        like: a tensor with that partition.
        counts: see `squared_norms`.
        is_exact: sums exactly, so the results have the same bits under any partition; with
            another all-reduce, of the largest elements.
    """
    parts = local_parts(tensors)
    if not is_exact:
        return add_up(squared_norms(parts, counts), like)
    from trainer.partition import exact

    assert counts is None or max(counts) == 1, "stacks are for devices that compile graphs"
    bounds = _square_bounds(parts, like)
    pairs = zip(parts, bounds, strict=True)
    words = torch.stack(
        [exact.add_squares(part, bound, _MOST_ELEMENTS) for part, bound in pairs], 1
    )
    return exact.total(add_up(words, like))


def _square_bounds(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """For each whole tensor, a power of two above the squares of its elements; an all-reduce."""
    from trainer.partition import exact

    largest = torch.stack([exact.largest(part) for part in parts])
    return exact.bound_of(add_up(largest, like, dist.ReduceOp.MAX)) ** 2


@torch.no_grad()
def exact_sums(
    parts: Sequence[Tensor], like: Tensor, add: Callable[[int, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """Sums of squares over elements of whole tensors, as words; see `trainer.partition.exact`.

    Two all-reduces: of the largest elements, and of the sums.

    Args:
        parts: the local parts.
        like: a tensor with their partition.
        add: splits the squares of part i, fp64 [*part.shape], by their bound, and adds up the
            words: [2, ...].

    Returns:
        The sums of `add` over the ranks, [2, ...], part by part.
    """
    pairs = zip(parts, _square_bounds(parts, like), strict=True)
    sums = [add(index, part.double().square_(), bound) for index, (part, bound) in enumerate(pairs)]
    flat = add_up(torch.cat([each.flatten() for each in sums]), like)
    pieces = torch.split(flat, [each.numel() for each in sums])
    return [piece.view_as(each) for piece, each in zip(pieces, sums, strict=True)]
