"""Traces a training step without memory: its tensors are counted, not allocated.

The model's own forward and backward passes and the optimizer's own update run on PyTorch's fake
tensors, which have shapes and no values. So the operations of the code itself are counted, for any
family, objective, attention, precision and optimizer; there are no formulas that could be wrong.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.errors import ConfigError
from samestep.examples import Batch
from trainer import accelerators
from trainer.accelerators import DTYPES, Precision
from trainer.accelerators.attention import GpuAttention
from trainer.accelerators.detect import planned_attention
from trainer.inspect.plan.operators import Operator, Recorder, Scope
from trainer.models import Model
from trainer.models.fused import FusedAttention
from trainer.models.layers.attention import Attention
from trainer.objectives import Objective, OverBatch, Taught
from trainer.optim import Structure, groups
from trainer.training.experiment import Experiment
from trainer.training.weights.loading import load_config


@dataclass(frozen=True)
class Parameter:
    """A parameter and its optimizer state.

    Attributes:
        shape: of the whole parameter.
        unit: index of its sharding unit; None for the root unit.
        state: shapes of the optimizer's tensors for it, all fp32.
        trained: False if it is frozen, and has no gradient.
    """

    shape: tuple[int, ...]
    unit: int | None
    state: tuple[tuple[int, ...], ...]
    trained: bool = True

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Activations:
    """Peak bytes of the passes over a micro-batch, without weights, gradients and optimizer state.

    Under autocast, weights are copied to 16 bits; how many of the copies exist depends on the
    strategy.

    Attributes:
        bare: without copies, as where all weights are in 16 bits already.
        root: with copies of weights outside sharding units, as under FSDP2, which gathers the units
            in 16 bits.
        full: with all copies.
        saved: the part of `bare` that autograd keeps at the end of the forward pass.
    """

    bare: int
    root: int
    full: int
    saved: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made while it is active, as long as they live; views count once.

    Args:
        existing: tensors that are not counted.
        copied: parameters with copies in another precision that are counted apart: 1 for parameters
            of the root unit, 2 for others.

    Attributes:
        live: bytes of living tensors, of copies of kind 1, and of copies of kind 2.
        peaks: the most bytes at a time of the first of these, the first two, and all.
    """

    def __init__(
        self, existing: Iterable[Tensor] = (), copied: Mapping[Tensor, int] = MappingProxyType({})
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peaks, self._is_paused = [0, 0, 0], [0, 0, 0], False
        # Storages, not tensors: a view has the storage of its base.
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
        outputs = func(*args, **(kwargs or {}))
        kind = 0
        # Autocast copies weights to 16 bits by this operator.
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor):
            kind = self._kinds.get(args[0].untyped_storage(), 0)
        for tensor in tree_leaves(outputs):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            # Views and in-place operators return a known storage.
            if storage not in self._known:
                self._known.add(storage)
                nbytes = 0 if self._is_paused else storage.nbytes()
                self.live[kind] += nbytes
                # Python frees a fake tensor when the real one would be freed.
                weakref.finalize(storage, self._free, kind, nbytes)
                # Of [a, b, c], the peaks of a, a + b and a + b + c.
                self.peaks = list(map(max, self.peaks, accumulate(self.live)))
        return outputs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the tensors that are made meanwhile."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _free(self, kind: int, nbytes: int) -> None:
        self.live[kind] -= nbytes


class Step:
    """The training step of an experiment, on one device that holds the whole model.

    Args:
        on_cpu: whether it runs there; otherwise attention has the buffers of a GPU's kernels.
            Without an accelerator in the experiment, it is a GPU.

    Attributes:
        parameters: by name.
        update: bytes of temporary tensors in the optimizer's update of all parameters.
        teacher: of a distillation, or None.
        fuses_attention: whether the run computes attention by the accelerator's fused kernel.
        model: of fake tensors.
    """

    def __init__(self, experiment: Experiment, on_cpu: bool) -> None:
        self._precision: Precision = experiment.training.precision
        self._on_cpu, self._strategy = on_cpu, experiment.strategy
        self._fake = FakeTensorMode()
        self.teacher: Model | None = None
        with self._fake:
            self.model = experiment.build_model()
            self.model.train()
            self.model.activation_checkpointing = experiment.training.activation_checkpointing
            if experiment.training.residual != "fp32":
                self.model.residual_dtype = DTYPES[experiment.training.residual]
            named = dict(self.model.named_parameters())
            optimizer = experiment.optimizer.build(named.items(), Structure.of(self.model))
            groups.prime(optimizer)
            # Gradients exist from the start, as from the second micro-batch of a step on.
            for parameter in named.values():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
            # Only temporary tensors of the update count below.
            state = [value for each in optimizer.state.values() for value in each.values()]
            with LiveBytes([*_with_gradients(named.values()), *state]) as live:
                optimizer.step()
            teacher = experiment.objective.teacher_path
            if teacher is not None:
                self.teacher = load_config(teacher).build().requires_grad_(False).eval()
        self._optimizer = optimizer
        self.update = live.peaks[0]
        units = {
            p: i
            for i, unit in enumerate(self.model.sharding_units())
            for p in unit.parameters()
            if p.ndim > 1  # FSDP2 gathers vectors with the root unit, in fp32
        }
        self._copied: dict[Tensor, int] = {p: 2 if p in units else 1 for p in named.values()}
        self._kernel = None if on_cpu else self._planned_kernel(experiment.accelerator)
        self.fuses_attention = self._kernel is not None
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
        return sum(each.nbytes for each in self.teacher.parameters()) if self.teacher else 0

    def activations(
        self, objective: Objective, example: Batch, size: int, fused: bool = False
    ) -> Activations:
        """Traces the forward and backward passes over a micro-batch of copies of an example.

        Args:
            fused: whether the kernel of fused attention computes it, if the run has one.

        Raises:
            ConfigError: the objective reads the value of a tensor on the host.
        """
        live = LiveBytes(self._existing(), self._copied)
        if fused:
            self._fuse(self._kernel)
        try:
            saved = self._passes(objective, example, size, live, lambda: live.live[0])
        finally:
            self._fuse(None)
        bare, root, full = live.peaks
        return Activations(bare, root, full, saved)

    def operators(self, objective: Objective, example: Batch, size: int) -> list[Operator]:
        """Traces the operators of both passes over a micro-batch of copies of an example.

        Raises:
            ConfigError: the objective reads the value of a tensor on the host.
        """
        recorder = Recorder(self._existing())
        with ExitStack() as stack:
            for model in filter(None, (self.model, self.teacher)):
                stack.enter_context(recorder.scopes_of(model))
            self._passes(objective, example, size, recorder)
        return recorder.operators

    def update_operators(self) -> list[Operator]:
        """Traces the operators of the optimizer's update."""
        recorder = Recorder(self._existing())
        recorder.scope = Scope("optimizer")
        with self._fake, recorder:
            self._optimizer.step()
        return recorder.operators

    def _planned_kernel(self, accelerator: accelerators.Config | None) -> FusedAttention | None:
        """The kernel of fused attention that the run will use; None: none."""
        modules = [module for module in self.model.modules() if isinstance(module, Attention)]
        dtype = DTYPES[self._precision]
        kernels = [
            planned_attention(accelerator, each.inner // each.heads, dtype) for each in modules
        ]
        fuses = None not in kernels and self.model.fuse_attention(None)
        return kernels[0] if kernels and fuses else None

    def _fuse(self, kernel: FusedAttention | None) -> None:
        for model in filter(None, (self.model, self.teacher)):
            model.fuse_attention(kernel)

    def _existing(self) -> list[Tensor]:
        existing = _with_gradients(self._copied)
        return existing + (list(self.teacher.parameters()) if self.teacher is not None else [])

    def _passes(
        self,
        objective: Objective,
        example: Batch,
        size: int,
        mode: TorchDispatchMode,
        between: Callable[[], int] = lambda: 0,
    ) -> int:
        """Runs both passes under a mode; returns the result of `between`, called between them."""
        if self.teacher is not None and isinstance(objective, Taught):
            objective.attach(self.teacher)
        with self._fake, mode:
            batch = {
                # An example is one row: [1, S] becomes [size, S].
                name: torch.empty((size, *column.shape[1:]), dtype=torch.from_numpy(column).dtype)
                for name, column in example.items()
            }
            totals = {name: torch.empty(()) for name in objective.weights(example)}
            kernels = None
            if isinstance(mode, LiveBytes):
                kernels = self._strategy.planned_operators(mode.paused)
            if kernels is None:
                kernels = nullcontext() if self._on_cpu else GpuAttention()
            # The fake tensors are on the CPU, whatever device the run is planned for.
            dtype, enabled = DTYPES[self._precision], self._precision != "fp32"
            try:
                with kernels, torch.autocast("cpu", dtype, enabled=enabled):
                    if isinstance(objective, OverBatch):
                        with torch.no_grad():
                            table = objective.summary(self.model, batch)
                        batch["over_batch"] = objective.over_batch(table)
                    total = objective.loss(self.model, batch, totals).total
                found = between()
                total.backward()  # type: ignore[no-untyped-call]
            except DataDependentOutputException as error:
                raise ConfigError(
                    f"a step of this objective cannot be planned: {error} needs a value on the "
                    "host, and tensors have no values here. Keep values on the device, which also "
                    "makes training faster"
                ) from error
        return found


def _with_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters, and the gradients of those that have one."""
    return [tensor for p in parameters for tensor in (p, p.grad) if tensor is not None]


def _shapes(state: Mapping[str, Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for key, value in state.items() if key != "step")
