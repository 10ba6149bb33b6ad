"""The strategy `xla_spmd`: one program for all devices of a TPU slice, see strategies/xla."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from samestep.config import Tree
from samestep.errors import ConfigError
from trainer import accelerators, strategies
from trainer.accelerators import Accelerator, Precision
from trainer.accelerators.kinds import cpu, cuda
from trainer.strategies.world import World
from trainer.strategies.xla import planned
from trainer.strategies.xla.spmd import XlaSpmd


@dataclass(frozen=True)
class Config(strategies.ShardedConfig):
    """Shards the model over all devices of a TPU slice, or over groups of them.

    Attributes:
        replicas: copies of the whole model: each is sharded over devices / replicas. 1 shards one
            copy over all; the number of slices keeps the gathering of parameters inside a slice.
        scan_layers: stacks equal parameters of all layers in one tensor and runs the layers as a
            loop of the graph, so 24 layers compile as fast as 2; false unrolls the loop.
        flash_attention_from: shortest sequence, in tokens, whose attention is JAX's Pallas kernel,
            where that fits: TPUs, `torch-xla[pallas]`, precision bf16, multiples of 128 tokens,
            layers as a loop, no dropout of attention probabilities and no relative positions. null
            never uses it.
    """

    scan_layers: bool = True
    flash_attention_from: int | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flash_attention_from is not None and self.flash_attention_from < 1:
            raise ConfigError(
                f"flash_attention_from is {self.flash_attention_from}. Use at least 1, or null to "
                "disable the kernel."
            )

    def check(self, experiment: Tree) -> None:
        training = experiment["training"]
        if training["compile"]:
            raise ConfigError(
                "training.compile is for torch.compile, and XLA compiles every step. Set it to "
                "false."
            )
        if self.scan_layers and experiment["optimizer"].get("layer_decay", 1.0) != 1:
            raise ConfigError(
                "optimizer.layer_decay gives each layer a learning rate of its own, and "
                "strategy.scan_layers stacks the layers' parameters in one tensor. Set "
                "strategy.scan_layers=false."
            )
        if experiment["optimizer"].get("unfreeze_every") is not None:
            raise ConfigError(
                "optimizer.unfreeze_every gives each stage of a run another update, which XLA "
                "would compile again. Set it to null, or use another strategy."
            )
        if training["activation_checkpointing"] and not self.scan_layers:
            raise ConfigError(
                "training.activation_checkpointing needs strategy.scan_layers=true: outside of a "
                "loop, XLA would detect that the recomputed values exist already, and keep them."
            )

    def fits_one_process(self, accelerator: accelerators.Config | None) -> bool:
        return not isinstance(accelerator, cpu.Config | cuda.Config)

    @property
    def plan_note(self) -> str:
        return (
            "TPUs under XLA: take the row of fsdp (or hsdp, with replicas). It counts what the "
            "loops of layers keep, the most of a step. The compiler orders operations and places "
            "tensors: its peaks were 6 % lower to 10 % higher, and all that it reports for "
            "T5 was half as much again: leave a third of the memory (docs/tpu.md)."
        )

    def planned_operators(
        self, free: Callable[[], AbstractContextManager[object]]
    ) -> planned.XlaOperators:
        return planned.XlaOperators(free, self.flash_attention_from)

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> XlaSpmd:
        return XlaSpmd(
            accelerator,
            world,
            precision,
            replicas=self.replicas,
            scan_layers=self.scan_layers,
            flash_attention_from=self.flash_attention_from,
        )
