"""Fully sharded data parallelism (FSDP2), and hybrid sharding (HSDP) over a mesh of 2 dimensions.

Parameters, gradients and optimizer state are sharded over devices. A layer's parameters are
all-gathered for its forward and its backward pass, and freed after each (Zhao et al. 2023, "PyTorch
FSDP"; the idea is ZeRO-3, Rajbhandari et al. 2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from trainer import strategies
from trainer.accelerators import DTYPES, Accelerator, Precision
from trainer.models import Model
from trainer.partition import is_dtensor
from trainer.strategies import Strategy
from trainer.strategies.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    from trainer.strategies.exact import GradientSums, ShardingUnitReduction

# torch.distributed.fsdp is imported by the functions that need it: it takes as long as half of
# torch, and every command that reads an experiment imports this module.


@dataclass(frozen=True)
class Config(strategies.ShardedConfig):
    """Shards the model over all devices, or over groups of them.

    Attributes:
        replicas: copies of the whole model (HSDP): each is sharded over world_size / replicas
            devices, and gradients are all-reduced between copies. 1 shards one copy over all
            devices; the number of nodes keeps the gathering of parameters inside a node.
        reshard_after_forward: frees a layer's gathered parameters after its forward pass (ZeRO-3);
            false keeps them until its backward pass (ZeRO-2: more memory, half the gathering).
        reduce_each_micro_batch: reduces and scatters gradients after each micro-batch, so that no
            device holds a whole layer's gradients between micro-batches (fp32: 45 GB for
            T5-11B); false does it once a step, with less traffic.
    """

    supports_exact = True

    reshard_after_forward: bool = True
    reduce_each_micro_batch: bool = False

    def build(
        self, accelerator: Accelerator, world: World, precision: Precision
    ) -> FullyShardedDataParallel:
        self.check_devices(world.size)
        return FullyShardedDataParallel(accelerator, world, precision, self)


class FullyShardedDataParallel(Strategy):
    kind = "fsdp"

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, config: Config
    ) -> None:
        super().__init__(accelerator, world, precision)
        self._config = config
        self.partitions = world.size // config.replicas
        # With 8 ranks and 2 replicas, the mesh is [[0, 1, 2, 3], [4, 5, 6, 7]]: parameters are
        # gathered inside a row, and gradients are all-reduced along each column.
        self._replicas: dist.ProcessGroup | None = None
        if config.replicas == 1:
            self._mesh = world.mesh(accelerator.device, shard=world.size)
        else:
            self._mesh = world.mesh(
                accelerator.device, replicate=config.replicas, shard=self.partitions
            )
            self._replicas = self._mesh.get_group("replicate")
        self._reductions: list[ShardingUnitReduction] = []
        self._units: list[FSDPModule] = []

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # An in-place change of the model's output would skip a gather; no loss makes one.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        # Under 16-bit precision, layers' matrices are gathered in 16 bits: half the traffic, and
        # autocast makes no copies of weights, which autograd would keep whole until the backward
        # pass. Gradients are summed in fp32.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.precision != "fp32" and not self.exact:
            policy = MixedPrecisionPolicy(
                DTYPES[self.precision], torch.float32, cast_forward_inputs=False
            )
        # Norms compute with fp32 weights under every strategy, so vectors stay out of the units:
        # they are gathered in fp32 with the parameters outside of units.
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        # HSDP's own all-reduce adds floats. `ShardingUnitReduction` adds up the words of replicas.
        mesh = self._mesh["shard"] if self.exact else self._mesh
        for module in cast(Model, model).sharding_units():
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self._config.reshard_after_forward,
                mp_policy=policy,
                ignored_params=set(vectors),
            )
        # FSDP2 looks for parameters in modules that belong to no unit.
        model.add_module("outside_units", nn.ParameterList(vectors))
        fully_shard(model, mesh=mesh)
        del model.outside_units
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if self.exact:
            from trainer.strategies.exact import ShardingUnitReduction

            for unit in self._units:
                each = self._config.reduce_each_micro_batch
                self._reductions.append(ShardingUnitReduction(self._replicas, each))
                unit.set_custom_reduce_scatter(cast("ReduceScatter", self._reductions[-1]))

    @cached_property
    def _whole(self) -> GradientSums:
        """Exact sums where a rank has the whole unit, and FSDP2 reduces nothing."""
        from trainer.strategies.exact import GradientSums

        return GradientSums(self._replicas)

    def refresh(self) -> None:
        # After a pass without a backward pass, the root stays gathered, and every unit without
        # `reshard_after_forward`. The next pass would compute with these old weights.
        for unit in self._units:
            unit.reshard()
        # An error or Ctrl-C inside a pass leaves a unit in a state in which `reshard` does nothing.
        if not all(map(is_dtensor, self._module.parameters())):
            cast("FSDPModule", self._module).reset_iter_state()

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        if self.exact:
            if self.partitions == 1:
                return self._whole.unit(self.parameters.values(), last)
            return self._reduced(last)
        module = cast("FSDPModule", self._module)
        module.set_requires_gradient_sync(last or self._config.reduce_each_micro_batch)
        module.set_requires_all_reduce(last)  # between the copies of HSDP
        return nullcontext()

    @contextmanager
    def _reduced(self, last: bool) -> Iterator[None]:
        """Surrounds a unit whose gradients `ShardingUnitReduction` adds up."""
        for reduction in self._reductions:
            reduction.last = last
        try:
            yield
        except BaseException:
            for reduction in self._reductions:
                reduction.forget()
            raise
