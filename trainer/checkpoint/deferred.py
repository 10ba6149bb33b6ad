"""Deferred tensors: converting all tensors of a model takes the memory of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trainer.checkpoint.layout import StoredTensors

T = TypeVar("T")


class Deferred(Tensor):
    """A tensor with a shape and a dtype, whose elements are computed when `make` is called.

    An operation on deferred tensors (cat, split, transpose, ...) is recorded and gives deferred
    tensors. So a function that maps all parameters to another library's names runs once, without
    memory, and its results are then made and freed one by one.

    Attributes:
        make: computes the tensor, again at each call.
    """

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, described: Tensor, make: Callable[[], Tensor]) -> Deferred:
        """Takes shape, strides and dtype from `described`, which may be on the meta device."""
        self: Deferred = Tensor._make_wrapper_subclass(
            cls, described.shape, strides=described.stride(), dtype=described.dtype
        )
        self.make = make
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        def call(convert: Callable[[object], object]) -> object:
            return function(*tree_map(convert, args), **tree_map(convert, dict(kwargs or {})))

        # Conversions branch on this one question about elements (are two tensors tied?).
        if function is torch.ops.aten.equal.default:
            return call(_made)

        def make(index: int) -> Tensor:
            made: Tensor = tree_flatten(call(_made))[0][index]
            return made

        # Runs the operation on meta tensors for the shapes; `make` repeats it on real ones.
        outputs, structure = tree_flatten(call(_on_meta))
        deferred = [Deferred(each, partial(make, index)) for index, each in enumerate(outputs)]
        return tree_unflatten(deferred, structure)


def defer(stored: StoredTensors) -> dict[str, Tensor]:
    """Returns stored tensors as deferred tensors, which are read when they are made."""
    deferred: dict[str, Tensor] = {}
    for name, pieces in stored.pieces.items():
        described = torch.empty(pieces[0].shape, dtype=pieces[0].dtype, device="meta")
        deferred[name] = Deferred(described, partial(stored.__getitem__, name))
    return deferred


def stored(deferred: Mapping[str, Tensor]) -> StoredTensors:
    """Returns deferred tensors as stored tensors, which are made on access."""
    return StoredTensors.of(deferred, _made)


def _made(value: T) -> T | Tensor:
    return value.make() if isinstance(value, Deferred) else value


def _on_meta(value: T) -> T | Tensor:
    if not isinstance(value, Deferred):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
