"""Memory and communication of each strategy: the bytes that a device holds and sends in a step.

A `Step` traced on one device gives the sizes of the whole. How they are divided follows from the
code of the strategies. Tests compare it with the tensors of real runs and their collectives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainer.inspect.plan.trace import Activations, Parameter
from trainer.strategies.kinds.deepspeed import BUCKET

_FP32 = 4


@dataclass(frozen=True)
class Held:
    """Bytes of memory at the peak of a step, on the device that holds most.

    Attributes:
        parameters: that the optimizer updates; the copy for the passes, if there is one; a teacher.
        gradients: as of the second micro-batch of a step, if it has several.
        optimizer: its state.
        activations: everything else that forward and backward passes hold.
        buffers: of the strategy's collectives, gathered parameters included.
        update: temporary tensors of the optimizer's update.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    update: int

    @property
    def state(self) -> int:
        """Bytes that last from step to step."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        # Activations and most buffers are freed before the optimizer's update begins.
        return self.state + self.gradients + max(self.activations + self.buffers, self.update)


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in which a device takes part during a step.

    Attributes:
        kind: of the collective.
        nbytes: of the whole tensors: the outputs of all-gathers, the inputs of the others.
        ranks: number of processes in each.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce"]
    nbytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends by the ring algorithm, the minimum (Patarasuk & Yuan 2009)."""
        # An all-reduce is a reduce-scatter and an all-gather.
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.nbytes * (self.ranks - 1) / self.ranks


@dataclass
class Division(ABC):
    """How a strategy divides a step among devices.

    Attributes:
        parameters: of the model.
        update: bytes of temporary tensors in the optimizer's update of all parameters.
        width: bytes per element in matrix products.
        devices: number of devices.
    """

    parameters: Sequence[Parameter]
    update: int
    width: int
    devices: int

    @abstractmethod
    def held(self, activations: Activations, accumulates: bool) -> Held:
        """Returns the bytes on a device; `accumulates`: a step has several micro-batches."""

    @abstractmethod
    def exchanged(self, micro_batches: int) -> list[Collective]:
        """Returns the collectives of a step, without norms and counts (some kilobytes)."""

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(each.elements for each in self.parameters)

    @property
    def trained(self) -> int:
        """Number of elements of the parameters that are not frozen."""
        return sum(each.elements for each in self.parameters if each.trained)

    def state(self, parts: int) -> int:
        """Returns the bytes of optimizer state of one of `parts` devices.

        A tensor with the shape of its parameter is split; any other, such as Adafactor's row means,
        is whole on every device.
        """
        return sum(
            _FP32 * (self.split(shape, parts) if shape == each.shape else math.prod(shape))
            for each in self.parameters
            for shape in each.state
        )

    def split(self, shape: tuple[int, ...], parts: int) -> int:
        """Returns the most elements of a tensor that one of `parts` devices holds."""
        return -(-math.prod(shape) // parts)


class Whole(Division):
    """`single`, and `ddp`: its buckets are the gradients themselves."""

    def held(self, activations: Activations, accumulates: bool) -> Held:
        # DDP's buckets are views of the gradients (gradient_as_bucket_view), so they cost nothing.
        weights, gradients = _FP32 * self.elements, _FP32 * self.trained
        return Held(weights, gradients, self.state(1), activations.full, 0, self.update)

    def exchanged(self, micro_batches: int) -> list[Collective]:
        if self.devices == 1:
            return []
        return [Collective("all-reduce", _FP32 * self.trained, self.devices)]


@dataclass
class Rows(Division):
    """`fsdp` (FSDP2): parameters are sharded by rows; units are gathered for their passes.

    Attributes:
        parts: devices that hold one copy of the model; under HSDP fewer than `devices`.
        reshard: whether gathered units are freed between their forward and backward passes.
        reduce_each: whether gradients are reduced after each micro-batch.
    """

    parts: int
    reshard: bool = True
    reduce_each: bool = False

    def __post_init__(self) -> None:
        # Elements of each sharding unit (None: the root unit) with padding: a shard has
        # ceil(rows / parts) rows. Of 5 rows, each of 4 devices has 2, the last one only padding.
        self._units: dict[int | None, int] = defaultdict(int)
        self._gradients: dict[int | None, int] = defaultdict(int)
        for each in self.parameters:
            size = self.parts * self.split(each.shape, self.parts)
            self._units[each.unit] += size
            self._gradients[each.unit] += size * each.trained
        self._root = self._units[None]
        self._padded = sum(self._units.values())
        self._padded_gradients = sum(self._gradients.values())

    def split(self, shape: tuple[int, ...], parts: int) -> int:
        """Returns the elements of a shard, which has whole rows."""
        return -(-shape[0] // parts) * math.prod(shape[1:])

    def held(self, activations: Activations, accumulates: bool) -> Held:
        gradients = _FP32 * self._padded_gradients // self.parts
        whole = accumulates and not self.reduce_each
        if whole:  # they stay unsharded until the last micro-batch reduces them
            gradients += _FP32 * self.trained
        return Held(
            parameters=_FP32 * self._padded // self.parts,
            gradients=gradients,
            optimizer=self.state(self.parts),
            # Units are gathered in 16 bits, so autocast copies the weights of the root unit only.
            activations=activations.root if self.width < _FP32 else activations.full,
            buffers=self._buffers(whole),
            update=self.update // self.parts,
        )

    def _buffers(self, whole: bool) -> int:
        """Returns the bytes of buffers at the peak of the backward pass.

        The root unit is gathered all the time. Of the others, the current one and the next are; if
        units are not resharded after the forward pass, all are. The gradients of the current unit
        are copied for their reduce-scatter. `whole`: these gradients themselves are not
        counted here, since `held` includes all units' gradients.
        """
        unit, unit_gradients = (
            max((size for key, size in sizes.items() if key is not None), default=0)
            for sizes in (self._units, self._gradients)
        )
        # Prefetching gathers the next unit while the current one computes.
        gathered = 2 * unit if self.reshard else self._padded - self._root
        copies = _FP32 if whole else self.width + _FP32
        return _FP32 * self._root + self.width * gathered + copies * unit_gradients

    def exchanged(self, micro_batches: int) -> list[Collective]:
        passes = 2 if self.reshard else 1
        # The root is gathered once, in fp32; units in the run's precision, for each pass.
        units = passes * self.width * (self._padded - self._root)
        gathered = micro_batches * (_FP32 * self._root + units)
        gradients = _FP32 * self._padded_gradients
        reductions = micro_batches if self.reduce_each else 1
        found = [
            Collective("all-gather", gathered, self.parts),
            Collective("reduce-scatter", reductions * gradients, self.parts),
        ]
        copies = self.devices // self.parts
        if copies > 1:  # HSDP: shards are reduced over the copies of the model
            found.append(Collective("all-reduce", gradients // self.parts, copies))
        return found


@dataclass(frozen=True)
class Buffers:
    """DeepSpeed's sizes of ZeRO's buffers, in elements.

    Attributes:
        bucket: buffer in which gradients are reduced; None takes the strategy's.
        overlap: whether stages 1 and 2 have two such buffers.
        prefetch: elements that stage 3 gathers ahead.
        persistent: stage 3 keeps parameters of up to this size gathered.
        reuse: stage 3 keeps a gathered parameter that is used again within this distance.
    """

    bucket: int | None = None
    overlap: bool = False
    prefetch: int = 50_000_000
    persistent: int = 100_000
    reuse: int = 1_000_000_000


@dataclass
class Ranges(Division):
    """ZeRO: flat partitions of the optimizer state (stage 1), gradients (2) and parameters (3).

    Attributes:
        stage: 1, 2 or 3.
        offload_optimizer: whether the optimizer's state with its parameters and gradients is in the
            host's memory.
        offload_parameters: whether stage 3's parameters for the passes are in the host's memory.
        buffers: settings of DeepSpeed.
    """

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    buffers: Buffers = Buffers()

    def __post_init__(self) -> None:
        bucket = self.buffers.bucket
        self._bucket = min(BUCKET, self.trained) if bucket is None else bucket
        sizes = [each.elements for each in self.parameters]
        self._persistent = sum(size for size in sizes if size <= self.buffers.persistent)
        self._gathered = self.elements - self._persistent
        # What the forward pass leaves gathered for the backward pass: the last layers. The distance
        # counts elements there and back, so these are half of it.
        self._kept = min(self._gathered, self.buffers.reuse // 2)

    def held(self, activations: Activations, accumulates: bool) -> Held:
        on_device = not self.offload_optimizer
        # fp32, of the trained parameters and of their gradients alike.
        partition = on_device * _FP32 * self.split((self.trained,), self.devices)
        copy = self.elements
        if self.stage == 3:
            shard = self.split((self.elements,), self.devices)
            # Small parameters stay gathered on every device, even if the others are offloaded.
            copy = (not self.offload_parameters) * shard + self._persistent
        return Held(
            parameters=self.width * copy + partition,
            gradients=partition + (_FP32 * self.trained if self.stage == 1 else 0),
            optimizer=on_device * self.state(self.devices),
            activations=activations.bare if self.width < _FP32 else activations.full,
            buffers=self._buffers(),
            update=on_device * self.update // self.devices,
        )

    def _buffers(self) -> int:
        """Returns the bytes of buckets and gathered parameters."""
        if self.stage == 3:
            largest = max(each.elements for each in self.parameters)
            # Between forward and backward: kept layers, the prefetched ones, and the current one.
            gathered = min(self._gathered, self._kept + self.buffers.prefetch + largest)
            return _FP32 * self._bucket + self.width * gathered
        width = _FP32 if self.stage == 1 else self.width
        buckets = width * (2 if self.buffers.overlap else 1)
        if width < _FP32:  # gradients are reduced in fp32, so stage 2 copies a bucket of 16 bits
            buckets += _FP32
        return self._bucket * buckets

    def exchanged(self, micro_batches: int) -> list[Collective]:
        gradients, weights = _FP32 * self.trained, self.width * self.trained
        if self.stage < 3:
            # DeepSpeed all-reduces its buckets, although each process keeps only its partition.
            reductions = 1 if self.stage == 1 else micro_batches
            return [
                Collective("all-reduce", reductions * gradients, self.devices),
                Collective("all-gather", weights, self.devices),
            ]
        # Each micro-batch gathers for both passes, without what is kept in between.
        gathered = micro_batches * (2 * self._gathered - self._kept) + self._persistent
        return [
            Collective("reduce-scatter", micro_batches * gradients, self.devices),
            Collective("all-gather", self.width * gathered, self.devices),
        ]


def interpolate(size: int, traced: Sequence[tuple[int, Activations]]) -> Activations:
    """Estimates the activations of a micro-batch between traced ones, which are in ascending order.

    A peak is the maximum of several sums that are linear in the number of examples, so it is
    convex, and a linear interpolation never underestimates it; except for logits in chunks: their
    memory stops growing.
    """
    for (low, below), (high, above) in pairwise(traced):
        if size <= high:
            # Size 3 between 1 and 5 is halfway.
            share = (size - low) / (high - low)
            pairs = zip(vars(below).values(), vars(above).values(), strict=True)
            return Activations(*(round(a + share * (b - a)) for a, b in pairs))
    return traced[-1][1]
