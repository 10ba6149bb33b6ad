"""Runs inside Hugging Face Accelerate, as configured by `accelerate launch` or `accelerate config`.

Accelerate decides which processes take part and how the run is partitioned. The experiment decides
the result of a step, so Accelerate gets neither loader, optimizer nor loss. What it would do to
them does not happen: distributing batches, dividing the loss by the number of accumulation steps,
clipping, its autocast around the model, equal random numbers in all processes.

Data parallelism is Accelerate's own. Sharding is done by the strategies `fsdp` and `deepspeed` with
its settings: Accelerate would have processes hold the whole model first, find layers by the class
names of transformers, and sum gradients in 16 bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from samestep.config import Tree
from samestep.environment import number
from samestep.errors import ConfigError, MissingExtra
from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.strategies import Strategy
from trainer.strategies.kinds import deepspeed, fsdp
from trainer.strategies.world import World

if TYPE_CHECKING:
    import accelerate

logger = logging.getLogger(__name__)

_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")
_KINDS = (*_DDP, "FSDP", "DEEPSPEED")
_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_DEEPSPEED_JSON = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
# Requests that are not supported: environment variable -> values without effect, and the fix.
_DATA_PARALLEL = (("1",), "leave it out; a run is data parallel only")
_REFUSED = {
    "ACCELERATE_DYNAMO_BACKEND": (
        ("no",),
        "leave it out; training.compile=true compiles each layer",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "choose FSDP or DEEPSPEED as distributed_type"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("1", "auto"),
        "set it to auto; it follows from the batch sizes",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (("none", "cpu"), "use cpu"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (("none", "cpu"), "use cpu"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        ("false",),
        "leave it out; activations are recomputed, not moved",
    ),
    "FSDP_OFFLOAD_PARAMS": (("false",), "leave it out; DeepSpeed's stage 3 can offload parameters"),
    "FSDP_IGNORED_MODULES": (("",), "leave it out; all parameters are sharded"),
    "PARALLELISM_CONFIG_TP_SIZE": _DATA_PARALLEL,
    "PARALLELISM_CONFIG_CP_SIZE": _DATA_PARALLEL,
    "PARALLELISM_CONFIG_SP_SIZE": _DATA_PARALLEL,
}


@dataclass(frozen=True)
class Config(strategies.Config):
    """Partitions the run as configured for Hugging Face Accelerate: DDP, FSDP or DeepSpeed.

    Attributes:
        config: a file written by `accelerate config`. None takes the settings of `accelerate
            launch`, or DDP if the run was started in another way.
    """

    config: str | None = None

    def check(self, experiment: Tree) -> None:
        with self._environment():
            if problems := [*_unsupported(), *_contradictions(experiment["training"])]:
                raise ConfigError(
                    f"settings of Accelerate do not fit this run: {'; '.join(problems)}"
                )
            if _requested() == "DEEPSPEED":
                zero = _zero()
                zero.check({**experiment, "strategy": asdict(zero)})

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Strategy:
        with self._environment():
            kind = _requested()
            # Made for every kind, as it rejects what Accelerate cannot do here.
            made = _make(kind, accelerator, world)
            if kind == "FSDP":
                return _fsdp(made, world).build(accelerator, world, precision)
            if kind == "DEEPSPEED":
                return _zero().build(accelerator, world, precision)
            return Accelerated(accelerator, world, precision, made)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Sets the environment variables that Accelerate reads its settings from."""
        try:
            from accelerate.utils import patch_environment
        except ImportError:
            raise MissingExtra("accelerate", "accelerate", "strategy accelerate") from None
        settings = {} if self.config is None else _settings_of(self.config)
        # Otherwise Accelerate would choose a number of threads.
        with patch_environment(**settings, OMP_NUM_THREADS=torch.get_num_threads()):
            yield


class Accelerated(Strategy):
    """Data parallelism with Accelerate's wrapper around the model."""

    kind = "accelerate"

    def __init__(
        self,
        accelerator: Accelerator,
        world: World,
        precision: Precision,
        made: accelerate.Accelerator,
    ) -> None:
        super().__init__(accelerator, world, precision)
        self._made = made

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped: nn.Module = self._made.prepare_model(model)
        return wrapped

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        # Before the last micro-batch, gradients stay on their rank.
        if last:
            return nullcontext()
        return cast(AbstractContextManager[object], self._made.no_sync(self._module))


def _settings_of(file: str) -> dict[str, str]:
    """The environment variables that `accelerate launch --config_file FILE` sets for processes.

    Accelerate's own code computes them.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ConfigError(
            "accelerate launch has started this run with settings of its own, and strategy.config "
            f"is {file}. Leave out one of the two."
        )
    # Override the file's machines and processes: these were started already.
    others = ["--num_machines=1", "--num_processes=1", "--main_process_port=0"]
    try:
        args = launch.launch_command_parser().parse_args(
            [f"--config_file={file}", *others, "samestep"]
        )
        args, defaults, mixed = launch._validate_launch_command(args)
        kind = defaults.distributed_type.value
        if args.use_deepspeed:
            fields = [*defaults.deepspeed_config, *(["mixed_precision"] if mixed else [])]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, found = environments.prepare_deepspeed_cmd_env(args)
        elif args.multi_gpu or args.use_fsdp:
            found = environments.prepare_multi_gpu_env(args)
        else:
            _, found = environments.prepare_simple_launcher_cmd_env(args)
    except Exception as error:  # Accelerate has no type of its own for a bad file
        raise ConfigError(
            f"strategy.config: Accelerate cannot read {file} ({type(error).__name__}: {error}). "
            "Write one with `accelerate config --config_file FILE`."
        ) from error
    if kind not in _KINDS or defaults.compute_environment.value != "LOCAL_MACHINE":
        raise ConfigError(
            f"strategy.config: {file} is for {kind} on {defaults.compute_environment.value}, and "
            f"samestep runs {', '.join(_KINDS)} on LOCAL_MACHINE. Write one of these with "
            "`accelerate config`."
        )
    # Without addresses and ranks: the launcher of this run has set these.
    return {name: value for name, value in found.items() if name.startswith(_PREFIXES)}


def _requested() -> str:
    """The requested kind: DEEPSPEED, FSDP, MEGATRON_LM (which is not supported), or else DDP."""
    from accelerate.utils import parse_flag_from_env

    kinds = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
    return next((kind for kind in kinds if parse_flag_from_env(f"ACCELERATE_USE_{kind}")), "DDP")


def _unsupported() -> Iterator[str]:
    """Requests to Accelerate that no run supports, each with the fix."""
    for name, (harmless, fix) in _REFUSED.items():
        if (value := os.environ.get(name, harmless[0])).lower() not in harmless:
            yield f"{name}={value}: {fix}"


def _contradictions(training: Tree) -> Iterator[str]:
    """Settings of Accelerate that differ from the experiment's, each with the fix.

    A DeepSpeed JSON is checked by the strategy `deepspeed`.
    """
    from accelerate.utils import parse_flag_from_env

    precision, norm = training["precision"], training["max_grad_norm"]
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION")
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    # A DeepSpeed JSON sets the precision itself; then "no" is only Accelerate's default.
    unset = {None, "no"} if _DEEPSPEED_JSON in os.environ else {None}
    if mixed not in unset | {_MIXED_PRECISION[precision]}:
        yield f"mixed_precision is {mixed} and training.precision {precision}: change one of them"
    if clipping != "auto" and float(clipping) != (norm or 0):
        yield f"gradient_clipping is {clipping} and training.max_grad_norm {norm}: set it to auto"
    recompute = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if recompute and not training["activation_checkpointing"]:
        yield "fsdp_activation_checkpointing is on: set training.activation_checkpointing=true, too"


def _make(kind: str, accelerator: Accelerator, world: World) -> accelerate.Accelerator:
    """Creates Accelerate's own object, after the rendezvous of the processes.

    Raises:
        ConfigError: Accelerate creates something else than requested, which it does silently.
    """
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    device = accelerator.device
    # accelerate launch sets both for several processes, but no RANK on CPUs.
    launched = "MASTER_ADDR" in os.environ and "ACCELERATE_USE_CPU" in os.environ
    if launched and "RANK" not in os.environ:
        raise ConfigError(
            "accelerate launch was asked for several processes and has started this one without a "
            "RANK, as it does on CPUs. Append `--processes N` to the command of samestep, or use "
            "torchrun."
        )
    fix = "Start the run with accelerate launch or torchrun."
    if device.type == "cpu" and kind in ("FSDP", "DEEPSPEED"):
        fix = f"On CPUs, set strategy={kind.lower()}."
    try:
        made = accelerate.Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",  # `Strategy.autocast` sets the precision
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except Exception as error:  # Accelerate has no type of its own for bad settings
        raise ConfigError(
            f"{kind} was asked for, and Accelerate cannot make it here: {error}. {fix}"
        ) from error
    found = made.distributed_type.value
    if found not in (_DDP if kind == "DDP" else (kind,)):
        raise ConfigError(
            f"{kind} was asked for, and Accelerate makes {found} of it on this {device.type}. {fix}"
        )
    if (made.device.type, made.device.index or 0) != (device.type, device.index or 0):
        raise ConfigError(
            f"Accelerate takes {made.device} and this run {device}. Set "
            f"accelerator={made.device.type}."
        )
    if made.num_processes != world.size:
        raise ConfigError(
            f"Accelerate sees {made.num_processes} processes and this run {world.size}. Start it "
            "with accelerate launch, torchrun or --processes, which give each process its rank."
        )
    return made


def _fsdp(made: accelerate.Accelerator, world: World) -> fsdp.Config:
    """FSDP's settings.

    Version 1 runs as version 2, which partitions parameters differently with the same results.
    """
    plugin, parallelism = made.state.fsdp_plugin, made.parallelism_config
    if plugin.fsdp_version == 2:
        replicas = 1 if parallelism is None else parallelism.dp_replicate_size
        return fsdp.Config(replicas, plugin.reshard_after_forward)
    sharding = plugin.sharding_strategy.name
    logger.info("accelerate   FSDP1 with %s runs as FSDP2", sharding)
    nodes = world.size // max(1, number("LOCAL_WORLD_SIZE", world.size))
    # FSDP1's hybrid sharding has a copy on each node; NO_SHARD has one on each rank.
    replicas = nodes if "HYBRID" in sharding else world.size if sharding == "NO_SHARD" else 1
    return fsdp.Config(replicas, reshard_after_forward=sharding in ("FULL_SHARD", "HYBRID_SHARD"))


def _zero() -> deepspeed.Config:
    """DeepSpeed's settings, including its JSON."""
    from accelerate.utils import DeepSpeedPlugin

    try:
        plugin = DeepSpeedPlugin()
    except Exception as error:  # Accelerate has no type of its own for bad settings
        raise ConfigError(
            f"Accelerate rejects these settings of DeepSpeed: {error}. Run accelerate config again."
        ) from error
    if plugin.zero_stage not in (1, 2, 3):
        raise ConfigError(
            f"zero_stage is {plugin.zero_stage}, and ZeRO has the stages 1, 2 and 3. To partition "
            "nothing, choose MULTI_GPU as distributed_type."
        )
    return deepspeed.Config(
        stage=plugin.zero_stage,
        offload_optimizer=plugin.offload_optimizer_device == "cpu",
        offload_parameters=plugin.offload_param_device == "cpu",
        config=os.environ.get(_DEEPSPEED_JSON),
    )
