"""A training step without memory: the tensors that it makes are counted, not allocated.

The model's own forward and backward passes and the optimizer's own update run on PyTorch's fake
tensors, which have shapes and no values. So what is counted is what the code does, whatever the
family, objective, attention, precision or optimizer; nothing is taken from a rule of thumb.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.accelerators import DTYPES, Precision, cpu
from trainer.accelerators.attention import GpuAttention
from trainer.errors import ConfigError
from trainer.examples import Batch
from trainer.objectives import Objective, Taught
from trainer.optim import Structure, groups
from trainer.training.experiment import Experiment
from trainer.training.weights import load_config


@dataclass(frozen=True)
class Parameter:
    """A parameter, and what the optimizer keeps of it.

    Attributes:
        shape: of the whole.
        unit: the number of the sharding unit it belongs to; None for the root unit.
        state: shapes of the optimizer's tensors for it, all of them fp32.
        trained: whether it has a gradient; it is frozen else.
    """

    shape: tuple[int, ...]
    unit: int | None
    state: tuple[tuple[int, ...], ...]
    trained: bool = True

    @property
    def elements(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Activations:
    """The most bytes that passes over a micro-batch hold at a time beside weights, gradients and
    optimizer state.

    Under autocast the copies of weights in 16 bits are part of it, as far as a strategy needs them.

    Attributes:
        bare: without copies of weights, as where all of them are at hand in 16 bits.
        root: with copies of those outside sharding units, as under FSDP2, which gathers the units
            in 16 bits.
        full: with all copies.
        saved: of `bare`, what autograd keeps at the end of the forward pass.
    """

    bare: int
    root: int
    full: int
    saved: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made while it is on, for as long as they live.

    Views count once.

    Args:
        existing: tensors that are there already, and are not counted.
        copied: of parameters: 1 for those of the root unit, 2 for others. Copies of them in another
            precision are counted apart.

    Attributes:
        live: bytes alive of tensors, of copies of the root unit's parameters, and of copies of
            others.
        peaks: the most that were alive at a time: of the first of these kinds, the first two, and
            all.
    """

    def __init__(
        self, existing: Iterable[Tensor] = (), copied: Mapping[Tensor, int] = MappingProxyType({})
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peaks = [0, 0, 0], [0, 0, 0]
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)
        self._kinds = weakref.WeakKeyDictionary(
            {parameter.untyped_storage(): kind for parameter, kind in copied.items()}
        )

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        kind = 0
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor):
            kind = self._kinds.get(args[0].untyped_storage(), 0)
        for tensor in tree_leaves(made):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage()) not in self._known
            ):
                self._known.add(storage)
                self.live[kind] += storage.nbytes()
                weakref.finalize(storage, self._free, kind, storage.nbytes())
                self.peaks = [
                    max(peak, alive)
                    for peak, alive in zip(self.peaks, accumulate(self.live), strict=True)
                ]
        return made

    def _free(self, kind: int, nbytes: int) -> None:
        self.live[kind] -= nbytes


class Step:
    """The training step of an experiment, on one device that holds the whole model.

    Args:
        experiment: what is trained.
        on_cpu: whether it runs there, or attention runs a GPU's kernels.

    Attributes:
        parameters: by name.
        update: bytes of temporary tensors in the optimizer's update of all parameters.
        teacher: of a distillation; None where there is none.
    """

    def __init__(self, experiment: Experiment, on_cpu: bool) -> None:
        self._precision: Precision = experiment.training.precision
        self._on_cpu = on_cpu
        self._fake = FakeTensorMode()
        with self._fake:
            self._model = experiment.build_model()
            self._model.train()
            self._model.activation_checkpointing = experiment.training.activation_checkpointing
            named = dict(self._model.named_parameters())
            optimizer = experiment.optimizer.build(named.items(), Structure.of(self._model))
            groups.prime(optimizer)
            trained = [parameter for parameter in named.values() if parameter.requires_grad]
            for parameter in trained:  # as from the second micro-batch of a step on
                parameter.grad = torch.empty_like(parameter)
            state = [value for each in optimizer.state.values() for value in each.values()]
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            with LiveBytes([*named.values(), *gradients, *state]) as live:
                optimizer.step()
            teacher = experiment.objective.teacher_path
            self.teacher: nn.Module | None = None
            if teacher is not None:
                self.teacher = load_config(teacher).build().requires_grad_(False).eval()
        self.update = live.peaks[0]
        units = {
            p: i for i, unit in enumerate(self._model.sharding_units()) for p in unit.parameters()
        }
        self._copied: dict[Tensor, int] = {
            parameter: 2 if parameter in units else 1 for parameter in named.values()
        }
        self.parameters = {
            name: Parameter(
                tuple(parameter.shape),
                units.get(parameter),
                _shapes(optimizer.state.get(parameter, {})),
                parameter.requires_grad,
            )
            for name, parameter in named.items()
        }

    @property
    def frozen(self) -> int:
        """Bytes of the teacher's parameters, which each device holds whole."""
        return (
            0
            if self.teacher is None
            else sum(parameter.nbytes for parameter in self.teacher.parameters())
        )

    def activations(self, objective: Objective, example: Batch, rows: int) -> Activations:
        """Runs forward and backward passes over so many copies of an example.

        Raises:
            ConfigError: they need the values of tensors, as they do where an objective reads one on
                the host.
        """
        existing = [
            each
            for parameter in self._copied
            for each in (parameter, parameter.grad)
            if each is not None
        ]
        if self.teacher is not None:
            existing += self.teacher.parameters()
            cast(Taught, objective).attach(self.teacher)
        with self._fake, LiveBytes(existing, self._copied) as live:
            batch = {
                name: torch.empty((rows, *column.shape[1:]), dtype=torch.from_numpy(column).dtype)
                for name, column in example.items()
            }
            totals = {name: torch.empty(()) for name in objective.weights(example)}
            kernels: AbstractContextManager[object] = (
                nullcontext() if self._on_cpu else GpuAttention()
            )
            try:
                with kernels, _autocast(self._precision):
                    total = objective.loss(self._model, batch, totals).total
                saved = live.live[0]
                total.backward()  # type: ignore[no-untyped-call]
            except DataDependentOutputException as error:
                raise ConfigError(
                    f"a step of this objective cannot be planned: {error} needs a value on the "
                    "host, and tensors have "
                    "none here; leave values on the device (which training is faster with, too)"
                ) from error
        bare, root, full = live.peaks
        return Activations(bare, root, full, saved)


def on_cpu(experiment: Experiment) -> bool:
    """Whether an experiment names the CPU; if not, it is planned for the kernels of a GPU."""
    return isinstance(experiment.accelerator, cpu.Config)


def _autocast(precision: Precision) -> AbstractContextManager[object]:
    return torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32")


def _shapes(state: Mapping[str, Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for key, value in state.items() if key != "step")
