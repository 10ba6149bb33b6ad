"""Tensors that are made when they are needed.

What is done to all of a model takes the memory of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trainer.checkpoint.layout import StoredPiece, StoredTensors

T = TypeVar("T")


class Deferred(Tensor):
    """The promise of a tensor: its shape and type are there, and its elements once `make` is
    called.

    Whatever is done to promises (joining, cutting, transposing) gives promises. So a mapping of all
    parameters to those of another library is run once, at no cost, and each of its results is then
    made and let go one by one.

    Attributes:
        make: makes the tensor, anew at each call.
    """

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, described: Tensor, make: Callable[[], Tensor]) -> Deferred:
        """
        Args:
            described: a tensor of the shape and type, which may be on the meta device.
            make: as the attribute.
        """
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

        if (
            function is torch.ops.aten.equal.default
        ):  # the only question that is asked about elements
            return call(_made)

        def make(index: int) -> Tensor:
            made: Tensor = tree_flatten(call(_made))[0][index]
            return made

        described, structure = tree_flatten(call(_described))
        return tree_unflatten(
            [Deferred(each, partial(make, index)) for index, each in enumerate(described)],
            structure,
        )


def promises(stored: StoredTensors) -> dict[str, Tensor]:
    """Stored tensors as promises to read them."""
    return {
        name: Deferred(
            torch.empty(stored.shape(name), dtype=stored.pieces[name][0].dtype, device="meta"),
            partial(stored.__getitem__, name),
        )
        for name in stored
    }


def stored(promised: Mapping[str, Tensor]) -> StoredTensors:
    """What has become of promises, as stored tensors that are made when they are asked for."""
    return StoredTensors({name: [_stored_piece(name, each)] for name, each in promised.items()})


def _stored_piece(name: str, promised: Tensor) -> StoredPiece:
    shape = tuple(promised.shape)

    def elements(start: int, stop: int) -> Tensor:
        return _made(promised).flatten()[start:stop]

    return StoredPiece(name, shape, (0,) * len(shape), shape, promised.dtype, elements)


def _made(value: T) -> T | Tensor:
    return value.make() if isinstance(value, Deferred) else value


def _described(value: T) -> T | Tensor:
    if not isinstance(value, Deferred):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
