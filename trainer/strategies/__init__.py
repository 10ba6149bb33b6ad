"""How parameters, gradients, optimizer state and batches are partitioned over devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.config import Tree
from samestep.errors import ConfigError
from trainer import accelerators
from trainer.accelerators import Accelerator, Precision
from trainer.partition import flat_start, local_parts, whole_norms
from trainer.strategies.world import World

if TYPE_CHECKING:
    from trainer.strategies.loss_scale import LossScale

BuildOptimizer: TypeAlias = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Named parameters -> their optimizer."""
InitialValues: TypeAlias = Callable[[str, int, int], Tensor]
"""(parameter name, start, stop) -> elements [start, stop) of the flattened whole parameter, fp32.
"""
Reduction: TypeAlias = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class Replica:
    """The data-parallel rank of this process.

    Attributes:
        index: the process feeds part `index` of `count` of each global batch.
        count: number of processes that feed different examples.
        devices: the process splits its examples evenly over this many devices.
    """

    index: int
    count: int
    devices: int = 1


def divisors(devices: int) -> list[int]:
    """The numbers of equally large groups that devices can be split into."""
    return [number for number in range(1, devices + 1) if devices % number == 0]


def check_replicas(replicas: int, supported: Sequence[int], devices: int) -> None:
    """Raises a ConfigError if `replicas` is not among the supported numbers, which it names."""
    if replicas not in supported:
        raise ConfigError(
            f"strategy.replicas {replicas} does not divide the {devices} devices. Use one of "
            f"{list(supported)}."
        )


class Config(ABC):
    """The section `strategy` of an experiment: base class of the `Config` of each module.

    Attributes:
        supports_exact: whether gradients can be summed exactly (`training.exact`).
    """

    supports_exact: ClassVar[bool] = False

    @abstractmethod
    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Strategy:
        """Creates the strategy of this process.

        Raises:
            ConfigError: it does not support the accelerator, the world size or the precision.
        """

    def check(self, experiment: Tree) -> None:  # noqa: B027
        """Rejects an experiment, given as plain values, that is incompatible with the strategy.

        Raises:
            ConfigError: naming the settings.
        """

    def check_devices(self, devices: int) -> None:  # noqa: B027
        """Rejects a number of devices that the strategy cannot use.

        Raises:
            ConfigError: naming the numbers that it can use.
        """

    def fits_one_process(self, accelerator: accelerators.Config | None) -> bool:
        """Whether the strategy is meant for a single process, however many devices that drives.

        Args:
            accelerator: of the experiment; None: the best.
        """
        return False

    @property
    def plan(self) -> str | None:
        """The strategy's name in `samestep plan`; None if it cannot be planned."""
        return None

    @property
    def plan_note(self) -> str:
        """A note about this strategy for readers of the plan; may be empty."""
        return ""

    def planned_operators(
        self, free: Callable[[], AbstractContextManager[object]]
    ) -> AbstractContextManager[object] | None:
        """A context where operators on the CPU hold memory as under this strategy, for plans.

        New tensors in contexts of `free` do not count. None: as the accelerator's operators.
        """
        return None


@dataclass(frozen=True)
class ShardedConfig(Config):
    """Settings of a strategy that shards `replicas` copies of the model over the devices."""

    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}. Use at least 1.")

    def check_devices(self, devices: int) -> None:
        check_replicas(self.replicas, divisors(devices), devices)

    @property
    def plan(self) -> str:
        return "hsdp" if self.replicas > 1 else "fsdp"


class Strategy(ABC):
    """Partitions a training step over the processes of a run, without changing its result.

    Attributes:
        kind: its name in the configuration.
        device_types: the types of devices that it supports; None: all.
        compiles: whether it is for accelerators that compile graphs, or for all others.
        parameters: this process's partition of each parameter, by the name in the unwrapped model.
            The optimizer updates these; frozen parameters require no gradient. (An FSDP2 module's
            own `parameters` may be the gathered ones, depending on when they are read.)
        partitions: the number of partitions of the state. Rank r holds partition r % partitions,
            and ranks with the same partition are replicas of each other.
        loss_scale: the dynamic loss scale under fp16, else None.
        exact: whether all sums that weights depend on are exact (`training.exact: bitwise`). Set it
            before `prepare`.
        compiles_layers: whether layers are compiled (`training.compile`), so that what they compute
            may depend on the shapes of a batch, but not on its values.
    """

    kind: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None] = None
    compiles: ClassVar[bool] = False
    parameters: dict[str, nn.Parameter]
    partitions: int = 1
    exact: bool = False
    compiles_layers: bool = False

    def __init__(self, accelerator: Accelerator, world: World, precision: Precision) -> None:
        supported = self.device_types is None or accelerator.device.type in self.device_types
        if accelerator.compiles != self.compiles or not supported:
            fix = "strategy=fsdp" + (", or accelerator=xla" if self.compiles else "")
            fix = "strategy=xla_spmd" if accelerator.compiles else fix
            raise ConfigError(
                f"strategy {self.kind} does not fit {accelerator.description}. Use {fix}."
            )
        if precision not in accelerator.precisions:
            raise ConfigError(
                f"training.precision is {precision}, which {accelerator.description} does not "
                "compute with. Use bf16 or fp32."
            )
        self.accelerator = accelerator
        self.world = world
        self.precision = precision
        self.replica = Replica(world.rank, world.size)
        self.loss_scale: LossScale | None = None
        if precision == "fp16":
            from trainer.strategies.loss_scale import LossScale

            self.loss_scale = LossScale(accelerator.device, self.replica.count)

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Places a model from the meta device, initializes its parameters, builds its optimizer.

        Returns:
            The module to call in the forward pass, and the optimizer.
        """
        # A model is partitioned while it has no memory, so no device ever holds it whole.
        self._shard(model)
        model.to_empty(device=self.accelerator.device)
        # Before `_wrap`, which may prefix names: checkpoints have the names of the plain model.
        self.parameters = dict(model.named_parameters())
        self._initialize(initial_values)
        self._module = self._wrap(model)
        return self._module, build_optimizer(self.parameters.items())

    def _shard(self, model: nn.Module) -> None:  # noqa: B027
        """Partitions the parameters of a meta model."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module that exchanges gradients."""
        return model

    @torch.no_grad()
    def _initialize(self, initial_values: InitialValues) -> None:
        """Sets the local partition of each parameter to its initial values."""
        for name, parameter in self.parameters.items():
            # Values depend on seed, name and element, so each rank computes its own part of them.
            (local,), start = local_parts([parameter]), flat_start(parameter)
            local.copy_(initial_values(name, start, start + local.numel()).view(local.shape))

    @torch.no_grad()
    def place_frozen(self, model: nn.Module, values: InitialValues) -> nn.Module:
        """Initializes a meta model that is not trained, whole on each device, in eval mode."""
        # Whole on each device: without gradients and moments it takes a quarter of a trained one.
        model.to_empty(device=self.accelerator.device)
        for name, parameter in model.requires_grad_(False).named_parameters():
            parameter.copy_(values(name, 0, parameter.numel()).view(parameter.shape))
        return model.eval()

    def autocast(self) -> AbstractContextManager[object]:
        """Surrounds a forward pass: its matrix products are computed in the run's precision."""
        return self.accelerator.autocast(self.precision)

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        """Surrounds one micro-batch; gradients are exchanged in the last one of a step only."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this replica's part of the loss.

        Over replicas they are summed, not averaged.
        """
        if self.exact or (self.replica.count == 1 and self.loss_scale is None):
            loss.backward()  # type: ignore[no-untyped-call]
            return
        # Collectives average over replicas. The product undoes that: each replica's loss is
        # normalized by the whole batch already, so that replicas may have unequal parts. Under
        # fp16 the loss scale undoes it after the pass, in which a product could overflow.
        factor = self.replica.count if self.loss_scale is None else self.loss_scale.factor
        (loss * factor).backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scales gradients down to a global norm of at most `max_norm`; None: leaves them.

        Returns the norm before, a scalar in fp32; fp64 in an exact run. Under fp16, both norms are
        without the loss scale, which stays in the gradients until `step`.
        """
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        # Norms of whole tensors first: their sum then has one order under any partition.
        norms = whole_norms(gradients, trained[0], is_exact=self.exact)
        exact_norm: Tensor = torch.linalg.vector_norm(norms)
        norm = exact_norm.float()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.of_gradients
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        # fp64 shows a changed bit of a weight in the next step.
        return exact_norm if self.exact else norm

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        """Updates the parameters. Under fp16, skips the update if the norm is not finite."""
        if self.loss_scale is None:
            optimizer.step()
        else:
            self.loss_scale.step(optimizer, grad_norm)
        self.refresh()

    def refresh(self) -> None:  # noqa: B027
        """Updates or frees copies of `parameters` that passes use, after a step or a restore.

        Call it after any other change of `parameters`. Collective.
        """

    def all_reduce(self, value: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduces a tensor over all replicas.

        Args:
            value: of this replica's examples, on the device or the host; may be overwritten.

        Returns:
            The result, with the shape of `value`, on the device of the collective, which may
            differ from the device of `value`.
        """
        return self._reduce(value.to(self.accelerator.device, non_blocking=True), op)

    def _reduce(self, value: Tensor, op: Reduction) -> Tensor:
        if self.replica.count > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return value / self.replica.count if op == "mean" else value

    def all_rows(self, own: Tensor) -> Tensor:
        """The rows of all replicas: [B, ...] -> [replicas x B, ...]. Collective.

        All replicas have the same number of rows, padding rows included.
        """
        # Each fills in its own rows, and the sum is complete: of [a 0] and [0 b] it is [a b].
        table = own.new_zeros(self.replica.count, *own.shape)
        table[self.replica.index] = own
        return self.all_reduce(table).to(own.device).flatten(0, 1)

    def own_rows(self, rows: Tensor) -> Tensor:
        """This replica's part of `all_rows`: [replicas x B, ...] -> [B, ...]."""
        return rows.chunk(self.replica.count)[self.replica.index]

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies this replica's examples, CPU tensors [B, ...] by name, to the model's devices."""
        return self.accelerator.to_device(batch)

    def keep_rows(self, output: Tensor) -> Tensor:
        """Prepares an output [B, ...] of a forward pass, in its graph, for `rows_on_host`."""
        return output

    def rows_on_host(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies this replica's rows [B, ...] of results of `keep_rows` to the host."""
        return [output.cpu() for output in outputs]

    def to_host(self, tensors: Mapping[str, Tensor], copy: bool = True) -> Mapping[str, Tensor]:
        """Returns state in a form that can be saved, and overwritten by a restore.

        It is the state itself, unless the host cannot access it in place.

        Args:
            tensors: parameters and optimizer state by name, partitioned and stacked as by
                `prepare`.
            copy: whether values are needed. If not, nothing is copied.

        Returns:
            This process's partition of each tensor, by name and with its shape; stacked tensors
            one by one.
        """
        return tensors

    def from_host(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Updates the state after the results of `to_host` for it were overwritten."""
