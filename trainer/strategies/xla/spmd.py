"""XLA's SPMD: each machine runs one process that computes with whole tensors, and XLA shards them
over all devices of a slice.

Parameters, gradients and optimizer state are sharded by rows, as under FSDP2, and batches by
examples. XLA derives the all-gathers and reduce-scatters from that (Xu et al. 2021, "GSPMD").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.accelerators import Accelerator, Precision
from trainer.accelerators.kinds.xla import XlaAccelerator
from trainer.models import Model, UsesKernel
from trainer.models.stack import Stack
from trainer.partition import Segment, SegmentParameter, StackedParameter, layer_shape
from trainer.strategies import (
    BuildOptimizer,
    InitialValues,
    Replica,
    Strategy,
    check_replicas,
    divisors,
)
from trainer.strategies.world import World
from trainer.strategies.xla import flash
from trainer.strategies.xla.split import Axis, register, split

Split: TypeAlias = tuple[Axis, ...]
"""For each dimension of a tensor, the mesh axes that it is sharded over; None: not sharded."""


def check_slice(replicas: int, devices: int, here: int) -> None:
    """Checks that replicas of the model do not straddle machines.

    A replica must span whole machines, or a machine must hold whole replicas. With 16 devices on
    machines of 4, 2 replicas span two machines each, and 8 replicas use two devices each.

    Args:
        replicas: number of replicas.
        devices: number of devices in the slice.
        here: number of devices per machine.

    Raises:
        ConfigError: naming the numbers that fit.
    """
    # number of replicas -> devices per replica
    parts = {number: devices // number for number in divisors(devices)}
    fitting = [number for number, each in parts.items() if each % here == 0 or here % each == 0]
    check_replicas(replicas, fitting, devices)


class XlaSpmd(Strategy):
    """The strategy `xla_spmd`; arguments as for its `Config`."""

    kind = "xla_spmd"
    compiles = True

    def __init__(
        self,
        accelerator: Accelerator,
        world: World,
        precision: Precision,
        *,
        replicas: int,
        scan_layers: bool,
        flash_attention_from: int | None,
    ) -> None:
        super().__init__(accelerator, world, precision)
        import torch_xla.runtime
        from torch_xla.distributed.spmd import Mesh

        assert isinstance(accelerator, XlaAccelerator)
        self.accelerator: XlaAccelerator = accelerator
        devices = torch_xla.runtime.global_runtime_device_count()
        machines = torch_xla.runtime.process_count()
        if machines != world.size:
            raise ConfigError(
                f"the slice has {machines} machine{'s' if machines > 1 else ''}, but {world.size} "
                "processes were started. Start one process on each machine."
            )
        check_slice(replicas, devices, accelerator.devices)
        self.replica = Replica(world.rank, world.size, accelerator.devices)
        self._scan_layers = scan_layers
        self._flash_from = flash_attention_from if flash.usable(accelerator) else None
        self._parts = devices // replicas
        self._mesh = Mesh(self._devices(), (replicas, self._parts), ("replicate", "shard"))
        # Custom operators take numbers only, so they find the mesh by one.
        self._number = register(self._mesh)
        self._host: dict[str, Tensor] = {}
        self._group = self._group_of(min(self._parts // accelerator.devices or 1, world.size))

    def _devices(self) -> Any:
        """The ids of all devices, machine by machine.

        They are gathered, because the ids of rank r are not always the r-th of equal ranges: with
        two machines of two devices, rank 0 may have the devices 0 and 2.
        """
        import numpy as np
        from torch_xla import _XLAC

        mine = [int(name.rpartition(":")[2]) for name in _XLAC._xla_get_runtime_devices()]
        all_of = [mine] * self.world.size
        dist.all_gather_object(all_of, mine)
        return np.concatenate(all_of)

    def _group_of(self, machines: int) -> dist.ProcessGroup:
        """The processes that hold one replica together: `machines` consecutive ranks."""
        groups = [range(first, first + machines) for first in range(0, self.world.size, machines)]
        # Every process must take part in creating every group, also those that it is not in.
        made = [self.world.new_group(ranks) for ranks in groups]
        return made[self.world.rank // machines]

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        # Imported here: it imports TorchDynamo, which takes two thirds of a second.
        from trainer.strategies.xla.scanned_layers import (
            ScannedGroup,
            ScannedLayers,
            scanned_groups,
        )

        self.parameters = {}
        runs: dict[Stack, list[ScannedGroup]] = {}
        stacked: set[str] = set()
        declared = model.scan_groups() if self._scan_layers and isinstance(model, Model) else ()
        groups = list(scanned_groups(declared))
        recomputes = isinstance(model, Model) and model.activation_checkpointing
        if recomputes and (not groups or len(groups) < len(declared)):
            raise ConfigError(
                "training.activation_checkpointing: true works only for layers that run as a loop, "
                "and some layers of this model differ, for example because only some are frozen. "
                "Set it to false."
            )
        # Layers that run as a loop: one stacked parameter in place of one per layer.
        for group in groups:
            equal: dict[str, StackedParameter] = {}
            for own, each in group.stack[group.start].named_parameters():
                names = tuple(
                    f"{group.name}.{number}.{own}" for number in range(group.start, group.stop)
                )
                # The first name stands for the stack; `to_host` gives each layer its own again.
                equal[own] = self._stack(names, each, initial_values)
                self.parameters[names[0]] = equal[own]
                stacked.update(names)
            runs.setdefault(group.stack, []).append(ScannedGroup(group.start, group.stop, equal))
        # All other parameters. Tied parameters appear under several names and are placed once.
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if name in stacked:
                continue
            if parameter not in placed:
                whole = initial_values(name, 0, parameter.numel()).view(parameter.shape)
                on_devices = self._place(whole, self._rows(whole.shape))
                placed[parameter] = self.parameters[name] = nn.Parameter(
                    on_devices, parameter.requires_grad
                )
            _put(model, name, placed[parameter])
        self._split_activations(model)
        has_flash = self._flash_from is not None
        for stack, parts in runs.items():
            stack.runner = ScannedLayers(parts, self._split_stack, self.accelerator, has_flash)
        for module in model.modules():
            if runs and self._flash_from is not None and isinstance(module, UsesKernel):
                module.kernel = flash.FlashAttention(self._number, self._flash_from)
        self._optimizer = build_optimizer(self.parameters.items())
        # After the update, within its graph, so no later graph sees a parameter without a sharding.
        self._optimizer.register_step_post_hook(lambda *_: self._keep_split())
        return model, self._optimizer

    def place_frozen(self, model: nn.Module, values: InitialValues) -> nn.Module:
        for name, parameter in list(model.named_parameters()):
            whole = values(name, 0, parameter.numel()).view(parameter.shape)
            on_devices = self._place(whole, (None,) * whole.ndim)
            _put(model, name, nn.Parameter(on_devices, requires_grad=False))
        # The trained model's outputs, which meet its own, are sharded by examples.
        self._split_activations(model)
        return model.eval()

    def _split_activations(self, model: nn.Module) -> None:
        """Shards the outputs of all layers by examples.

        If it knew only how weights are sharded, XLA would often shard activations the same way
        instead of gathering the weights.
        """
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm):
                module.register_forward_hook(
                    lambda _module, _inputs, output: self._split_examples(output)
                )

    def _stack(
        self, names: tuple[str, ...], each: Tensor, initial_values: InitialValues
    ) -> StackedParameter:
        """Stacks the parameters of equal layers, with their values, on the devices.

        Only the rows that this machine's devices hold get values. The rest of the host's tensor is
        never touched, so the operating system allocates no memory for it.
        """
        whole, axes = torch.empty(len(names), *each.shape), self._rows(each.shape)
        first, stop = self._range(len(each)) if axes[0] else (0, len(each))
        row = math.prod(each.shape[1:])
        for name, own in zip(names, whole, strict=True):
            own[first:stop] = initial_values(name, first * row, stop * row).view(
                -1, *each.shape[1:]
            )
        return StackedParameter(self._place(whole, (None, *axes)), names, each.requires_grad)

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sends each device its examples; each machine feeds its own devices."""
        return {
            name: self._place(column, self._examples(column), own_rows=True)
            for name, column in batch.items()
        }

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of the whole batch: the loss is a sum over all devices."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                # Without this XLA would all-reduce gradients instead of reduce-scattering them.
                self._mark(parameter.grad, self._axes(parameter))
        return super().clip_grad_norm(max_norm)

    def all_reduce(self, value: Tensor, op: Literal["sum", "mean", "max"] = "sum") -> Tensor:
        """Reduces values of the host. Values on devices cover all rows already and are returned."""
        if value.device.type == "xla":
            return value
        dist.all_reduce(value, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return value / self.replica.count if op == "mean" else value

    def all_rows(self, own: Tensor) -> Tensor:
        """Returns its argument: a tensor on devices has the rows of all machines already."""
        return own

    def own_rows(self, rows: Tensor) -> Tensor:
        return rows

    def keep_rows(self, output: Tensor) -> Tensor:
        return self._split_examples(output)

    def rows_on_host(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The rows of this machine's devices; an XLA tensor has the rows of all machines."""
        import torch_xla.core.xla_model as xm
        from torch_xla import _XLAC

        xm.wait_device_ops()
        shards = (_XLAC._get_local_shards([output])[0] for output in outputs)
        return [torch.cat([shard for shard, _ in each]) for each in shards]

    def to_host(self, tensors: Mapping[str, Tensor], copy: bool = True) -> Mapping[str, Tensor]:
        """Copies the rows of this machine's devices to host memory, which later calls reuse."""
        import torch_xla.core.xla_model as xm

        # The graph that computes them may still be running.
        xm.wait_device_ops()
        return {
            own: part
            for name, tensor in tensors.items()
            for own, part in self._to_host(name, tensor, copy)
        }

    def _to_host(self, name: str, tensor: Tensor, copy: bool) -> Iterator[tuple[str, Tensor]]:
        from torch_xla import _XLAC

        shape, (first, stop), dim = layer_shape(tensor), self._held(tensor), _rows_dim(tensor)
        # Kept for later saves, as new memory costs page faults.
        if name not in self._host:
            self._host[name] = torch.empty(
                *tensor.shape[:dim], stop - first, *shape[1:], dtype=tensor.dtype
            )
        host = self._host[name]
        if copy:
            (shards,) = _XLAC._get_local_shards([tensor])
            for (shard, _), rows in zip(shards, self._places(tensor), strict=True):
                count = rows.stop - rows.start
                host.narrow(dim, rows.start - first, count).copy_(shard.narrow(dim, 0, count))
        stacked = isinstance(tensor, StackedParameter)
        names = tensor.members if isinstance(tensor, StackedParameter) else (name,)
        for own, part in zip(names, host if stacked else (host,), strict=True):
            # This machine holds a range of rows: as a segment, a partition that any reader knows.
            if stop - first < shape[0]:
                segment = Segment(shape, first * math.prod(shape[1:]), self._group)
                part = SegmentParameter(part.view(-1), segment, requires_grad=False)
            yield name.removesuffix(names[0]) + own, part

    def from_host(self, tensors: Mapping[str, Tensor]) -> None:
        """Sends each device its rows of the host's memory."""
        from torch_xla import _XLAC

        whole = []
        for name, tensor in tensors.items():
            host, dim = self._host[name], _rows_dim(tensor)
            if not self._is_split(tensor):
                whole.append((tensor, host))
                continue
            first, most, shards = self._held(tensor)[0], -(-tensor.shape[dim] // self._parts), []
            for rows in self._places(tensor):
                count = rows.stop - rows.start
                # All shards have the same shape: the last one is padded with zeros.
                shard = host.new_zeros(*host.shape[:dim], most, *host.shape[dim + 1 :])
                shard.narrow(dim, 0, count).copy_(host.narrow(dim, rows.start - first, count))
                shards.append(shard)
            _XLAC._load_local_shards(tensor, shards, _XLAC._xla_get_runtime_devices())
        # Whole tensors need no shards: one graph copies all of them.
        with self.accelerator.graph("restore"), torch.no_grad():
            for tensor, values in whole:
                tensor.copy_(values)

    def _places(self, tensor: Tensor) -> list[slice]:
        """The rows of a tensor that each device of this machine holds."""
        from torch_xla import _XLAC

        (places,), dim = _XLAC._get_local_shard_replica_and_indices([tensor]), _rows_dim(tensor)
        return [
            slice(0, tensor.shape[dim]) if place is Ellipsis else place[dim] for _, place in places
        ]

    def _held(self, tensor: Tensor) -> tuple[int, int]:
        """The range (first, stop) of a tensor's rows that this machine's devices hold."""
        rows = tensor.shape[_rows_dim(tensor)]
        return self._range(rows) if self._is_split(tensor) else (0, rows)

    def _is_split(self, tensor: Tensor) -> bool:
        from torch_xla import _XLAC

        return _XLAC._get_xla_sharding_spec(tensor) not in ("", "{replicated}")

    def _range(self, rows: int) -> tuple[int, int]:
        # Rounded up: 10 rows over 4 devices are 3, 3, 3 and 1. With 2 devices per machine, the
        # first holds rows 0-5, the second 6-9. A machine with whole replicas holds all rows.
        each = -(-rows // self._parts)
        here = min(self.replica.devices, self._parts)
        first = self.replica.index * self.replica.devices % self._parts
        return first * each, min(rows, (first + here) * each)

    def _axes(self, parameter: Tensor) -> Split:
        """How a parameter is sharded; a stacked one is sharded as each of its layers would be."""
        return (*[None] * _rows_dim(parameter), *self._rows(layer_shape(parameter)))

    def _rows(self, shape: Sequence[int]) -> Split:
        """Shards the rows of a matrix if every device gets some; vectors are replicated."""
        each = -(-shape[0] // self._parts)
        # Rounded up, 5 rows on 4 devices are 2, 2, 1 and 0: such a matrix is replicated.
        splits = len(shape) > 1 and 0 < (self._parts - 1) * each < shape[0]
        return ("shard" if splits else None, *[None] * (len(shape) - 1))

    def _examples(self, tensor: Tensor) -> Split:
        return (("replicate", "shard"), *[None] * (tensor.ndim - 1))

    def _split_examples(self, output: Tensor) -> Tensor:
        return split(output, self._number, self._examples(output))

    def _split_stack(self, stacked: Tensor) -> Tensor:
        """Shards each tensor of a stack as it would be sharded alone."""
        return split(stacked, self._number, (None, *self._rows(stacked.shape[1:])))

    def _place(self, tensor: Tensor, axes: Split, own_rows: bool = False) -> Tensor:
        """Sends a tensor of the host to the devices, sharded.

        `own_rows`: the tensor holds only the rows of this machine's devices.
        """
        from torch_xla.core.xla_model import send_cpu_data_to_device
        from torch_xla.distributed.spmd import ShardingSpec

        spec = ShardingSpec(self._mesh, axes, minibatch=own_rows)
        (placed,) = send_cpu_data_to_device([tensor], self.accelerator.device, input_sharding=spec)
        return cast(Tensor, placed)

    def _mark(self, tensor: Tensor, axes: Split) -> None:
        from torch_xla.distributed.spmd import mark_sharding

        mark_sharding(tensor, self._mesh, axes)

    def _keep_split(self) -> None:
        """Marks the sharding of parameters and optimizer state again: in-place updates lose it."""
        for parameter in self.parameters.values():
            axes = self._axes(parameter)
            self._mark(parameter, axes)
            for value in self._optimizer.state.get(parameter, {}).values():
                self._mark(value, axes if value.shape == parameter.shape else (None,) * value.ndim)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replaces a parameter of the model."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, parameter)


def _rows_dim(tensor: Tensor) -> int:
    """The dimension of a tensor's rows: 1 in a stack, whose dimension 0 is layers."""
    return int(isinstance(tensor, StackedParameter))
