"""DeepSpeed's ZeRO (Rajbhandari et al.

2020, arXiv 1910.02054): state, gradients and parameters in flat partitions.

DeepSpeed gathers parameters and reduces gradients. The update is ours: the optimizers, norms and
checkpoints of the other strategies, on the segments of tensors that a partition holds
(`trainer.partition`). So LAMB's trust ratios and Adafactor's rows are those of whole tensors, which
they are not where ZeRO hands an optimizer its flat partition.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from trainer import strategies
from trainer.accelerators import DTYPES, Accelerator, Precision, version_of
from trainer.config import Tree
from trainer.errors import ConfigError, MissingExtra
from trainer.strategies import BuildOptimizer, InitialValues, Strategy, check_accelerator
from trainer.strategies.deepspeed import settings
from trainer.strategies.world import World

_VERSION = "0.19"
BUCKET = 50_000_000  # elements at most; DeepSpeed's own default takes 2 GB
_PRECISION: dict[Precision, Tree] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1.0}},  # the loss comes scaled
}


@dataclass(frozen=True)
class Config(strategies.Config):
    """DeepSpeed's ZeRO: splits state, gradients and parameters over all devices, as flat ranges.

    Attributes:
        stage: what is split: 1 the optimizer's state; 2 gradients, too; 3 parameters, too.
        offload_optimizer: keeps the optimizer's state, the fp32 parameters and gradients in host
            memory, and updates there.
        offload_parameters: keeps parameters in host memory until a pass needs them; with stage 3
            only.
        config: a JSON of DeepSpeed with settings of its communication; what contradicts the
            experiment is refused.
    """

    stage: Literal[1, 2, 3] = 2
    offload_optimizer: bool = False
    offload_parameters: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(
                f"offload_parameters goes with stage 3, not with stage {self.stage}; set stage=3"
            )

    def check(self, experiment: Tree) -> None:
        if self.stage == 3 and experiment["training"]["compile"]:
            raise ConfigError(
                "training.compile does not go with strategy.stage 3, whose parameters are gathered "
                "by hooks inside of "
                "what would be compiled; set training.compile=false, strategy.stage=2, or "
                "strategy=fsdp"
            )
        if self.config is not None:
            settings.check(self.config, settings.read(self.config), experiment)

    @property
    def plan(self) -> str:
        return f"zero{self.stage}"

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> DeepSpeed:
        check_accelerator("deepspeed", accelerator, devices=("cpu", "cuda"))
        if (version := version_of("deepspeed")) is None:
            raise MissingExtra("deepspeed", "deepspeed", "strategy deepspeed")
        if not version.startswith(f"{_VERSION}."):
            raise ConfigError(
                f"strategy deepspeed works on the internals of DeepSpeed {_VERSION}, and {version} "
                "is installed; "
                f"pip install 'deepspeed=={_VERSION}.*', or use strategy=fsdp"
            )
        return DeepSpeed(accelerator, world, precision, self)


class DeepSpeed(Strategy):
    kind: ClassVar[str] = "deepspeed"

    def __init__(
        self, accelerator: Accelerator, world: World, precision: Precision, config: Config
    ) -> None:
        super().__init__(accelerator, world, precision)
        self._config = config
        self.partitions = world.size
        self._last = True
        self._reached: set[str] = set()

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
        except (ValueError, AssertionError) as error:  # of whatever type it meets settings with
            if self._config.config is None:
                raise
            raise ConfigError(
                f"strategy.config {self._config.config}: DeepSpeed does not take it: {error}"
            ) from error
        self._zero = self._engine.partitions()
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._trained = {names[parameter]: segment for parameter, segment in self._zero.segments()}
        frozen = [parameter for parameter in names if not parameter.requires_grad]
        self.parameters = {
            **self._trained,
            **{names[each]: self._zero.frozen(each) for each in frozen},
        }
        for parameter, name in names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        self._fill(initial_values)
        self.refresh()
        return model, build_optimizer(self.parameters.items())

    def _note(self, name: str, _: Tensor) -> None:
        self._reached.add(name)

    def _settings(self, model: nn.Module) -> Tree:
        """What DeepSpeed is told.

        It takes no step, so it needs to know nothing of batches and clipping.
        """
        config = self._config
        bucket = min(
            BUCKET,
            sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        )
        zero: Tree = {"reduce_bucket_size": bucket, "allgather_bucket_size": BUCKET}
        zero |= settings.zero_section(settings.read(config.config)) if config.config else {}
        for key, offload in (
            ("offload_optimizer", config.offload_optimizer),
            ("offload_param", config.offload_parameters),
        ):
            if offload:
                zero[key] = {**zero.get(key, {}), "device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**zero, "stage": config.stage},
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
        # DeepSpeed forgets them at once, whatever becomes of this step.
        for (name, segment), gradient in zip(
            self._trained.items(), self._zero.gradients(), strict=True
        ):
            segment.grad = gradient if name in self._reached else None
        self._reached.clear()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return (
            super().clip_grad_norm(max_norm).to(self.accelerator.device)
        )  # gradients may be offloaded

    def refresh(self) -> None:
        self._zero.refresh()
