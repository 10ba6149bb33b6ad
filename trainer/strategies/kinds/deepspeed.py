"""DeepSpeed's ZeRO: state, gradients and parameters in flat partitions.

Rajbhandari et al. 2020, arXiv 1910.02054. DeepSpeed gathers parameters and reduces gradients. The
update is samestep's own: the optimizers, norms and checkpoints of the other strategies, on the
segments of tensors in a partition (`trainer.partition`). So LAMB's trust ratios and Adafactor's row
means are computed from whole tensors. ZeRO itself hands its flat partition to an optimizer, which
would see no tensors in it.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.config import Tree
from samestep.errors import ConfigError, MissingExtra
from trainer import strategies
from trainer.accelerators import DTYPES, Accelerator, Precision, version_of
from trainer.strategies import BuildOptimizer, InitialValues, Strategy
from trainer.strategies.deepspeed import settings
from trainer.strategies.world import World

_VERSION = "0.19"
BUCKET = 50_000_000  # most elements of a bucket; DeepSpeed's default would allocate 2 GB
_PRECISION: dict[Precision, Tree] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The loss is scaled by `Strategy.backward`.
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1.0}},
}


@dataclass(frozen=True)
class Config(strategies.Config):
    """DeepSpeed's ZeRO: partitions state, gradients and parameters as flat ranges.

    Attributes:
        stage: what is partitioned: 1 the optimizer's state; 2 gradients, too; 3 parameters, too.
        offload_optimizer: keeps the optimizer's state, the fp32 parameters and gradients in host
            memory, and updates there.
        offload_parameters: keeps parameters in host memory until a pass needs them; with stage 3
            only.
        config: a DeepSpeed JSON with settings of its communication; settings that contradict the
            experiment are refused.
    """

    stage: Literal[1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(
                f"offload_parameters is for stage 3, and stage is {self.stage}. Set stage=3."
            )

    def check(self, experiment: Tree) -> None:
        if self.stage == 3 and experiment["training"]["compile"]:
            raise ConfigError(
                "training.compile does not go with strategy.stage 3: hooks inside of the compiled "
                "code would gather parameters. Set training.compile=false, strategy.stage=2, or "
                "strategy=fsdp."
            )
        if experiment["training"]["fp8"]:
            raise ConfigError(
                "training.fp8 does not go with strategy deepspeed. Use strategy=fsdp, or set "
                "training.fp8=false."
            )
        if self.config is not None:
            settings.check(self.config, settings.read(self.config), experiment)

    @property
    def plan(self) -> str:
        return f"zero{self.stage}"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> DeepSpeed:
        return DeepSpeed(accelerator, world, precision, self)


class DeepSpeed(Strategy):
    kind = "deepspeed"
    device_types = ("cpu", "cuda")

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, config: Config
    ) -> None:
        super().__init__(accelerator, world, precision)
        if (version := version_of("deepspeed")) is None:
            raise MissingExtra("deepspeed", "deepspeed", "strategy deepspeed")
        if not version.startswith(f"{_VERSION}."):
            raise ConfigError(
                f"strategy deepspeed works on the internals of DeepSpeed {_VERSION}, and {version} "
                f"is installed. Run pip install 'deepspeed=={_VERSION}.*', or use strategy=fsdp."
            )
        self._config = config
        self.partitions = world.size
        self._last = True
        # The parameters that the loss of this step depends on.
        self._reached: set[Tensor] = set()

    def prepare(
        self, model: nn.Module, build_optimizer: BuildOptimizer, initial_values: InitialValues
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        os.environ["DS_ACCELERATOR"] = self.accelerator.device.type
        from trainer.strategies.deepspeed import zero  # takes seconds to import

        logger = logging.getLogger("DeepSpeed")
        logger.handlers.clear()  # they write to stdout
        logger.propagate = True
        dtype = DTYPES[self.precision]
        try:
            self._engine = zero.Engine(model, dtype, self.accelerator.device, self._settings(model))
        except (ValueError, AssertionError) as error:  # DeepSpeed's errors about settings
            if self._config.config is None:
                raise
            raise ConfigError(
                f"strategy.config {self._config.config}: DeepSpeed rejects it: {error}. "
                "Correct the file, or leave strategy.config out."
            ) from error
        self._zero = self._engine.partitions(self.world)
        self._trained = list(self._zero.segments())
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = {names[parameter]: segment for parameter, segment in self._trained}
        for parameter, name in names.items():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook
                hook(self._reached.add)  # type: ignore[no-untyped-call]
            else:
                self.parameters[name] = self._zero.frozen(parameter)
        self._initialize(initial_values)
        self.refresh()
        return model, build_optimizer(self.parameters.items())

    def _settings(self, model: nn.Module) -> Tree:
        """Settings for DeepSpeed, as in its JSON.

        DeepSpeed's own step is never taken, so settings of batches and clipping are irrelevant.
        """
        config = self._config
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        section: Tree = {
            "reduce_bucket_size": min(BUCKET, trained),
            "allgather_bucket_size": BUCKET,
        }
        if config.config is not None:
            section |= settings.zero_section(settings.read(config.config))
        if config.offload_optimizer:
            section["offload_optimizer"] = {**section.get("offload_optimizer", {}), "device": "cpu"}
        if config.offload_parameters:
            section["offload_param"] = {**section.get("offload_param", {}), "device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**section, "stage": config.stage},
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            **_PRECISION[self.precision],
        }

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        self._last = last
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.begin_backward(self._last)
        super().backward(loss)
        self._engine.end_backward()
        if not self._last:
            return
        # DeepSpeed drops its gradients now, whether or not an update follows. A parameter that the
        # loss does not depend on has zeros there, and None under the other strategies.
        gradients = self._zero.gradients()
        for (parameter, segment), gradient in zip(self._trained, gradients, strict=True):
            segment.grad = gradient if parameter in self._reached else None
        self._reached.clear()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        # Offloaded gradients have their norm on the host.
        return super().clip_grad_norm(max_norm).to(self.accelerator.device)

    def refresh(self) -> None:
        self._zero.refresh()
