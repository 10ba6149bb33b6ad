"""Says inside of a graph how a tensor, and with it its gradient, is split over devices.

`mark_sharding` as a function.

torch-xla's own such function hands the mesh over as text, and makes and keeps another mesh in each
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Axis: TypeAlias = str | tuple[str, ...] | None
"""The axes of a mesh that a dimension is split over."""
_AXES: tuple[Axis, ...] = (None, "shard", ("replicate", "shard"))


class Mesh(Protocol):
    """The part of torch-xla's `Mesh` that is used here."""

    def size(self) -> int: ...


_MESHES: list[Mesh] = []  # operations take numbers


def register(mesh: Mesh) -> int:
    """Makes a mesh with the axes "replicate" and "shard" known; returns its number."""
    _MESHES.append(mesh)
    return len(_MESHES) - 1


def mesh_of(number: int) -> Mesh:
    """The mesh that was registered as `number`."""
    return _MESHES[number]


def split(tensor: Tensor, mesh: int, axes: Sequence[Axis]) -> Tensor:
    """The same tensor, split over devices; so is its gradient.

    Args:
        tensor: in a graph.
        mesh: the number of a mesh.
        axes: "shard", or both axes of the mesh, for each dimension that is split.
    """
    return _operation()(tensor, mesh, [_AXES.index(axis) for axis in axes])


class _Context(Protocol):
    """Values that are kept for the backward pass."""

    mesh: int
    axes: list[int]


@cache
def _operation() -> Callable[[Tensor, int, list[int]], Tensor]:
    """The operation as torch knows it, so that AOTAutograd may record it."""

    @torch.library.custom_op("samestep::split", mutates_args=())
    def marked(tensor: Tensor, mesh: int, axes: list[int]) -> Tensor:
        from torch_xla.distributed.spmd import mark_sharding

        out = tensor.clone()
        mark_sharding(out, mesh_of(mesh), tuple(_AXES[axis] for axis in axes))
        return out

    @marked.register_fake
    def _(tensor: Tensor, mesh: int, axes: list[int]) -> Tensor:
        return torch.empty_like(tensor)

    def keep(ctx: _Context, inputs: tuple[Tensor, int, list[int]], output: Tensor) -> None:
        _, ctx.mesh, ctx.axes = inputs

    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return marked(gradient, ctx.mesh, ctx.axes), None, None

    marked.register_autograd(backward, setup_context=keep)
    return marked
