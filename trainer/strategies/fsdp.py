"""Fully sharded data parallel (FSDP2), and hybrid sharding (HSDP) over a two-dimensional mesh.

Parameters, gradients and optimizer state are split over devices; a layer's parameters are gathered
for its forward and backward pass and freed again (Zhao et al. 2023, "PyTorch FSDP"; the idea is
ZeRO-3, Rajbhandari et al. 2020).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from trainer import strategies
from trainer.accelerators import DTYPES, Accelerator, Precision
from trainer.models import Model
from trainer.strategies import BuildOptimizer, InitialValues, Strategy
from trainer.strategies.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# torch.distributed.fsdp and device_mesh are imported where they are used: they take as long as half
# of torch, and every command that reads an experiment imports this module.


@dataclass(frozen=True)
class Config(strategies.ShardedConfig):
    """Splits the model over all devices, or over groups of them.

    Attributes:
        replicas: copies of the whole model (HSDP): each is split over world_size / replicas
            devices, and gradients are all-reduced between copies. 1 splits one copy over all
            devices; the number of nodes keeps the gathering of parameters inside a node.
        reshard_after_forward: frees a layer's gathered parameters after its forward pass (ZeRO-3);
            false keeps them until its backward pass (ZeRO-2: more memory, half the gathering).
    """

    reshard_after_forward: bool = True

    def build(
        self, accelerator: Accelerator, world: World, precision: Precision
    ) -> FullyShardedDataParallel:
        self.check_devices(world.size)
        return FullyShardedDataParallel(accelerator, world, precision, self)


class FullyShardedDataParallel(Strategy):
    kind: ClassVar[str] = "fsdp"

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, config: Config
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(accelerator, world, precision)
        self._config = config
        self.partitions = world.size // config.replicas
        device = accelerator.device.type
        if config.replicas == 1:
            self._mesh = init_device_mesh(device, (world.size,), mesh_dim_names=("shard",))
        else:
            shape = (config.replicas, world.size // config.replicas)
            self._mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # In 16 bits, layers are gathered so, too: half the traffic, and autocast makes no copies of
        # weights, which autograd would keep whole until the backward pass. Gradients are summed in
        # fp32.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.precision != "fp32":
            policy = MixedPrecisionPolicy(
                DTYPES[self.precision], torch.float32, cast_forward_inputs=False
            )
        for unit in cast(Model, model).sharding_units():
            reshard = self._config.reshard_after_forward
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=self._mesh)
        self._materialise(model, initial_values)
        self._module = cast("FSDPModule", model)
        return model, build_optimizer(self.parameters.items())

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        self._module.set_requires_gradient_sync(last)
        return nullcontext()
