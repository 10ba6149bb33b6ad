"""How parameters, gradients, optimizer state and batches are split over devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer import accelerators
from trainer.accelerators import Accelerator, Precision
from trainer.config import Tree
from trainer.errors import ConfigError
from trainer.partition import flat_start, local_parts, whole_norms
from trainer.strategies.loss_scale import LossScale
from trainer.strategies.world import World, host_group

NamedParameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]
BuildOptimizer: TypeAlias = Callable[[NamedParameters], torch.optim.Optimizer]
InitialValues: TypeAlias = Callable[[str, int, int], Tensor]
"""(parameter name, start, stop) -> elements [start, stop) of the flattened whole parameter, fp32.
"""


@dataclass(frozen=True)
class Replica:
    """The data-parallel coordinate of this process.

    It feeds slice `index` of `count` of each global batch.

    It splits its rows evenly over `devices`.
    """

    index: int
    count: int
    devices: int = 1


def check_accelerator(
    kind: str,
    accelerator: Accelerator,
    compiles: bool = False,
    devices: Sequence[str] | None = None,
) -> None:
    """Refuses an accelerator that a strategy is not for.

    Args:
        kind: of the strategy.
        accelerator: the run's.
        compiles: whether the strategy is for accelerators that do.
        devices: the types that it is for; None: all.

    Raises:
        ConfigError: naming a strategy that is.
    """
    if accelerator.compiles != compiles or (
        devices is not None and accelerator.device.type not in devices
    ):
        fix = "strategy=fsdp" + (", or accelerator=xla" if compiles else "")
        fix = "strategy=xla_spmd" if accelerator.compiles else fix
        raise ConfigError(f"strategy {kind} does not fit {accelerator.description}; use {fix}")


def divisors(devices: int) -> list[int]:
    """Into how many groups of one size so many devices can be split."""
    return [number for number in range(1, devices + 1) if devices % number == 0]


def check_replicas(replicas: int, fitting: Sequence[int], devices: int) -> None:
    """Refuses a number of copies of the model that is not among the fitting ones.

    Raises:
        ConfigError: naming these.
    """
    if replicas not in fitting:
        raise ConfigError(
            f"strategy.replicas {replicas} does not divide the {devices} devices; use one of "
            f"{list(fitting)}"
        )


class Config(ABC):
    """The section `strategy` of an experiment: the base of the `Config` of each module here."""

    @abstractmethod
    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Strategy:
        """Makes the strategy of this process.

        Raises:
            ConfigError: it does not fit the accelerator, the number of processes or the precision.
        """

    def check(self, experiment: Tree) -> None:  # noqa: B027
        """Rejects an experiment, given as plain values, with settings that do not fit the strategy.

        Raises:
            ConfigError: naming the settings.
        """

    def check_devices(self, devices: int) -> None:  # noqa: B027
        """Rejects a number of devices that a run cannot be split over.

        Raises:
            ConfigError: naming what fits.
        """

    def fits_one_process(self, accelerator: accelerators.Config | None) -> bool:
        """Whether it works in a single process, however many devices that process drives.

        Args:
            accelerator: the experiment's; None takes the best.
        """
        return False

    @property
    def plan(self) -> str | None:
        """The name of the strategy in `samestep plan`; None if it cannot be planned."""
        return None

    @property
    def plan_note(self) -> str:
        """What a reader of the plan has to know about this strategy; empty if there is nothing."""
        return ""


@dataclass(frozen=True)
class ShardedConfig(Config):
    """The settings of a strategy that shards `replicas` copies of the model over the devices."""

    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")

    def check_devices(self, devices: int) -> None:
        check_replicas(self.replicas, divisors(devices), devices)

    @property
    def plan(self) -> str:
        return "hsdp" if self.replicas > 1 else "fsdp"


class Strategy(ABC):
    """Splits a training step over the processes of a run, without changing what the step computes.

    Attributes:
        parameters: by their own names, whatever wraps the model; the partitions that the optimizer
            updates, and frozen ones, which require no gradient. (Asking an FSDP2 module instead
            gives its gathered parameters when it happens to hold them.)
        loss_scale: under fp16, what keeps small gradients from vanishing; else None.
        partitions: how many parts the state is split into. Rank r holds part r % partitions of it,
            and all ranks that hold the same part are replicas of each other.
        kind: its name in the configuration.
        compiles: whether it is for accelerators that do.
    """

    kind: ClassVar[str]
    parameters: dict[str, nn.Parameter]
    partitions: int = 1
    compiles: ClassVar[bool] = False

    def __init__(self, accelerator: Accelerator, world: World, precision: Precision) -> None:
        check_accelerator(self.kind, accelerator, self.compiles)
        if precision not in accelerator.precisions:
            raise ConfigError(
                f"training.precision is {precision}, which {accelerator.description} does not "
                "compute with; use bf16 "
                "or fp32"
            )
        self.accelerator = accelerator
        self.world = world
        self.precision = precision
        self.replica = Replica(world.rank, world.size)
        self.loss_scale = LossScale(accelerator.device) if precision == "fp16" else None
        self._host_group: dist.ProcessGroup | None = None

    @abstractmethod
    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Places a model built on the meta device, fills its parameters, and builds its optimizer.

        Returns:
            The module to call in the forward pass, and the optimizer.
        """

    @torch.no_grad()
    def place_frozen(self, model: nn.Module, values: InitialValues) -> nn.Module:
        """Gives a meta model that is not trained memory and values, whole on each device.

        Returns it in eval mode.
        """
        model.to_empty(device=self.accelerator.device)
        for name, parameter in model.requires_grad_(False).named_parameters():
            parameter.copy_(values(name, 0, parameter.numel()).view(parameter.shape))
        return model.eval()

    def autocast(self) -> AbstractContextManager[object]:
        """Surrounds a forward pass; matrix products in it are made in the run's precision."""
        return self.accelerator.autocast(self.precision)

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        """Surrounds one micro-batch; gradients are exchanged in the last one of a step only."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of this replica's share of the loss.

        Over replicas they are summed, not averaged.
        """
        loss = loss * self.replica.count  # undoes the collectives' mean
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.factor
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scales gradients down to a global norm of `max_norm` (None: leaves them).

        Returns the norm before.

        Under fp16, both norms are those without the loss scale, which stays in the gradients until
        `step`.
        """
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(whole_norms(gradients, trained[0])).float()
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.factor
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
        """Updates the parameters; under fp16, not with gradients that have overflowed, whose norm
        is not finite.
        """
        if self.loss_scale is None:
            optimizer.step()
        else:
            self.loss_scale.step(optimizer, grad_norm)
        self.refresh()

    def refresh(self) -> None:  # noqa: B027
        """Brings what passes compute with up to date, after `parameters` were changed by `step` or
        a restore.
        """

    def all_reduce(self, value: Tensor, op: Literal["sum", "mean", "max"] = "sum") -> Tensor:
        """Sums a tensor over all replicas, or takes the mean or the largest values.

        Args:
            value: of this replica's rows, on the device or the host; it may be overwritten.
            op: what is taken.

        Returns:
            The result, where collectives take place: of what is on the host that may be the device,
                too.
        """
        value = value.to(self.accelerator.device, non_blocking=True)
        dist.all_reduce(value, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return value / self.replica.count if op == "mean" else value

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies this replica's rows, CPU tensors, to where the model computes."""
        return self.accelerator.to_device(batch)

    def keep_rows(self, output: Tensor) -> Tensor:
        """A result [B, ...] of a forward pass, inside of its graph, for `rows_on_host`."""
        return output

    def rows_on_host(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """This replica's rows of what `keep_rows` has given, on the host."""
        return [output.cpu() for output in outputs]

    def to_host(self, tensors: Mapping[str, Tensor], copy: bool = True) -> Mapping[str, Tensor]:
        """State as it can be saved, and overwritten when it is restored.

        Itself, where the host reaches it in place.

        Args:
            tensors: parameters and optimizer state by name, split and stacked as `prepare` has made
                them.
            copy: whether values matter; if not, nothing is copied.

        Returns:
            By name, what this process holds of it; stacked ones come one by one.
        """
        return tensors

    def from_host(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Brings state up to date after what `to_host` has given for it was overwritten."""

    def largest(self, value: int) -> int:
        """The largest of the replicas' values, told to all of them.

        The device has no part in it.
        """
        if self.replica.count == 1:
            return value
        if self._host_group is None:
            self._host_group = host_group()
        number = torch.tensor(value)
        dist.all_reduce(number, dist.ReduceOp.MAX, self._host_group)
        return int(number)

    def _materialise(self, model: nn.Module, initial_values: InitialValues) -> None:
        """Allocates a meta model on the device and fills the partition of this rank."""
        model.to_empty(device=self.accelerator.device)
        self.parameters = dict(model.named_parameters())
        self._fill(initial_values)

    @torch.no_grad()
    def _fill(self, initial_values: InitialValues) -> None:
        """Gives `parameters` their values, as much of them as this process holds."""
        for name, parameter in self.parameters.items():
            (local,), start = local_parts([parameter]), flat_start(parameter)
            local.copy_(initial_values(name, start, start + local.numel()).view(local.shape))
