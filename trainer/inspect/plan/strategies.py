"""What each strategy makes of a training step.

What every device holds, and what it exchanges with the others.

A `Step` traced on one device says how large everything is. How it is divided follows from the
strategies' code, and tests compare it with the tensors of real runs, and with the collectives that
they call for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainer.inspect.plan.trace import Activations, Parameter
from trainer.strategies.deepspeed import BUCKET

_FP32 = 4


@dataclass(frozen=True)
class Held:
    """Bytes of one device's memory at the peak of a step, on the device that holds most.

    Attributes:
        parameters: what the optimizer updates, the copy that passes work with where that is
            another, and a teacher's.
        gradients: as they are from the second micro-batch of a step on, if it has several.
        optimizer: its state.
        activations: what forward and backward passes hold beside these.
        buffers: what the strategy's collectives hold, gathered parameters included.
        update: temporary tensors of the optimizer's update, when activations and most buffers are
            gone.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    update: int

    @property
    def state(self) -> int:
        """What lasts from step to step."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        return self.state + self.gradients + max(self.activations + self.buffers, self.update)


@dataclass(frozen=True)
class Collective:
    """What one device takes part in during a step.

    Attributes:
        kind: of the collective.
        nbytes: of the whole tensors: results of all-gathers, inputs of the others.
        ranks: how many processes take part in each.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    nbytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends, by the ring algorithm (Patarasuk & Yuan 2009), of which none
        sends less.
        """
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.nbytes * (self.ranks - 1) / self.ranks


class Division(ABC):
    """How a strategy divides a step.

    Args:
        parameters: of the model.
        update: bytes of temporary tensors of the whole optimizer's update.
        width: bytes of an element in matrix products.
        devices: how many there are.
    """

    def __init__(
        self, parameters: Iterable[Parameter], update: int, width: int, devices: int
    ) -> None:
        self.parameters, self.update, self.width, self.devices = (
            list(parameters),
            update,
            width,
            devices,
        )
        self.elements = sum(each.elements for each in self.parameters)
        self.trained = sum(each.elements for each in self.parameters if each.trained)

    @abstractmethod
    def held(self, activations: Activations, accumulates: bool) -> Held:
        """What a device holds; `accumulates`: whether a step has several micro-batches."""

    @abstractmethod
    def exchanged(self, micro_batches: int) -> list[Collective]:
        """What is exchanged in a step, without norms and counts, which take some kilobytes."""

    def state(self, parts: int) -> int:
        """Bytes of optimizer state where what has its parameter's shape is split.

        The rest is whole everywhere.
        """
        return sum(
            _FP32 * (self.split(shape, parts) if shape == each.shape else math.prod(shape))
            for each in self.parameters
            for shape in each.state
        )

    def split(self, shape: tuple[int, ...], parts: int) -> int:
        """The most elements of a tensor that one of `parts` devices holds."""
        return -(-math.prod(shape) // parts)


class Whole(Division):
    """`single`, and `ddp`, whose buckets of gradients are the gradients."""

    def held(self, activations: Activations, accumulates: bool) -> Held:
        weights, gradients = _FP32 * self.elements, _FP32 * self.trained
        return Held(weights, gradients, self.state(1), activations.full, 0, self.update)

    def exchanged(self, micro_batches: int) -> list[Collective]:
        return (
            [Collective("all-reduce", _FP32 * self.trained, self.devices)]
            if self.devices > 1
            else []
        )


class Rows(Division):
    """`fsdp` (FSDP2): each parameter is split by rows over `parts` devices.

    Units are gathered for their passes.

    Args:
        parts: devices that hold one copy of the model; with fewer than `devices` of them this is
            HSDP.
        reshard: whether gathered units are freed between their forward and backward passes.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        update: int,
        width: int,
        devices: int,
        parts: int,
        reshard: bool = True,
    ) -> None:
        super().__init__(parameters, update, width, devices)
        self.parts, self._reshard = parts, reshard
        padded = [parts * self.split(each.shape, parts) for each in self.parameters]
        self._padded = sum(padded)
        self._units: dict[int | None, int] = {}
        self._gradients: dict[int | None, int] = {}
        for each, size in zip(self.parameters, padded, strict=True):
            self._units[each.unit] = self._units.get(each.unit, 0) + size
            self._gradients[each.unit] = self._gradients.get(each.unit, 0) + size * each.trained
        self._padded_gradients = sum(self._gradients.values())

    def split(self, shape: tuple[int, ...], parts: int) -> int:
        """Whole rows."""
        return -(-shape[0] // parts) * math.prod(shape[1:])

    @property
    def _root(self) -> int:
        return self._units.get(None, 0)

    def held(self, activations: Activations, accumulates: bool) -> Held:
        part, gradients = (
            _FP32 * size // self.parts for size in (self._padded, self._padded_gradients)
        )
        whole = (
            _FP32 * self.trained if accumulates else 0
        )  # kept until the last micro-batch reduces them
        used = activations.root if self.width < _FP32 else activations.full
        buffers = self._buffers(accumulates)
        return Held(
            part,
            gradients + whole,
            self.state(self.parts),
            used,
            buffers,
            self.update // self.parts,
        )

    def _buffers(self, accumulates: bool) -> int:
        """At the height of the backward pass, or of the forward pass where units stay gathered.

        The root unit is gathered all the time, of the others the one at work and the next. The
        gradients of the unit at work are copied for their reduce-scatter; those of earlier
        micro-batches with them are counted as gradients.
        """
        unit, of_unit = (
            max((size for key, size in sizes.items() if key is not None), default=0)
            for sizes in (self._units, self._gradients)
        )
        gathered = 2 * unit if self._reshard else self._padded - self._root
        gradients = (_FP32 if accumulates else self.width + _FP32) * of_unit
        return _FP32 * self._root + self.width * gathered + gradients

    def exchanged(self, micro_batches: int) -> list[Collective]:
        units = self._padded - self._root
        passes = 2 if self._reshard else 1
        gathered = micro_batches * (_FP32 * self._root + passes * self.width * units)
        made = [
            Collective("all-gather", gathered, self.parts),
            Collective("reduce-scatter", _FP32 * self._padded_gradients, self.parts),
        ]
        copies = self.devices // self.parts
        if copies > 1:
            made.append(
                Collective("all-reduce", _FP32 * self._padded_gradients // self.parts, copies)
            )
        return made


@dataclass(frozen=True)
class Buffers:
    """DeepSpeed's settings of what ZeRO reduces and gathers at a time.

    Attributes:
        bucket: elements of the buffer in which gradients are reduced; None takes that of the
            strategy.
        overlap: whether stages 1 and 2 have two of them.
        prefetch: elements that stage 3 gathers ahead.
        persistent: stage 3 keeps parameters of up to so many elements gathered.
        reuse: stage 3 keeps what it has gathered if it is needed again within so many elements.
    """

    bucket: int | None = None
    overlap: bool = False
    prefetch: int = 50_000_000
    persistent: int = 100_000
    reuse: int = 1_000_000_000


class Ranges(Division):
    """ZeRO: the flattened parameters are split, of the optimizer (stage 1), gradients (2) and
    passes (3).

    Attributes:
        stage: 1, 2 or 3.
        offloads: whether the optimizer's state with its parameters and gradients, and whether the
            parameters of stage 3 that passes work with, are in the host's memory.
        buffers: settings of DeepSpeed.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        update: int,
        width: int,
        devices: int,
        stage: int,
        offloads: tuple[bool, bool] = (False, False),
        buffers: Buffers = Buffers(),
    ) -> None:
        super().__init__(parameters, update, width, devices)
        self.stage, self._offloads, self._overlap, self._prefetch = (
            stage,
            offloads,
            buffers.overlap,
            buffers.prefetch,
        )
        self._bucket = min(BUCKET, self.trained) if buffers.bucket is None else buffers.bucket
        self._persistent = sum(
            each.elements for each in self.parameters if each.elements <= buffers.persistent
        )
        self._gathered = self.elements - self._persistent
        self._kept = min(
            self._gathered, buffers.reuse // 2
        )  # from the forward pass, the last layers, to the backward pass

    def held(self, activations: Activations, accumulates: bool) -> Held:
        split, updated = (-(-size // self.devices) for size in (self.elements, self.trained))
        state_is_here, copy_is_here = (not offloaded for offloaded in self._offloads)
        part = state_is_here * _FP32 * updated
        copy = self.width * (
            copy_is_here * split + self._persistent if self.stage == 3 else self.elements
        )
        whole = _FP32 * self.trained if self.stage == 1 else 0
        return Held(
            parameters=copy + part,
            gradients=whole + part,
            optimizer=state_is_here * self.state(self.devices),
            activations=activations.bare if self.width < _FP32 else activations.full,
            buffers=self._buffers(),
            update=state_is_here * self.update // self.devices,
        )

    def _buffers(self) -> int:
        """Gradients are reduced in fp32, for which stage 2 copies a bucket of 16 bits."""
        if self.stage == 3:
            most = max(each.elements for each in self.parameters)
            return _FP32 * self._bucket + self.width * min(
                self._gathered, self._kept + self._prefetch + most
            )
        width = _FP32 if self.stage == 1 else self.width
        return self._bucket * (
            width * (2 if self._overlap else 1) + (_FP32 if width < _FP32 else 0)
        )

    def exchanged(self, micro_batches: int) -> list[Collective]:
        gradients, weights = _FP32 * self.trained, self.width * self.trained
        if (
            self.stage < 3
        ):  # DeepSpeed's buckets are all-reduced, although each process keeps its range alone
            reductions = 1 if self.stage == 1 else micro_batches
            return [
                Collective("all-reduce", reductions * gradients, self.devices),
                Collective("all-gather", weights, self.devices),
            ]
        gathered = micro_batches * (2 * self._gathered - self._kept) + self._persistent
        return [
            Collective("reduce-scatter", micro_batches * gradients, self.devices),
            Collective("all-gather", self.width * gathered, self.devices),
        ]


def interpolate(rows: int, traced: Sequence[tuple[int, Activations]]) -> Activations:
    """Activations of a micro-batch between those that were traced, in ascending order.

    A peak is the largest of several sums that grow with the rows, a convex function, so this is at
    least the truth.
    """
    for (low, below), (high, above) in pairwise(traced):
        if rows <= high:
            share = (rows - low) / (high - low)
            pairs = zip(vars(below).values(), vars(above).values(), strict=True)
            return Activations(*(round(a + share * (b - a)) for a, b in pairs))
    return traced[-1][1]
