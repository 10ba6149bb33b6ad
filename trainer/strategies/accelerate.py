"""A run inside Hugging Face Accelerate.

Split as `accelerate launch`, or a file of `accelerate config`, asks for.

Accelerate decides who takes part and how the run is split; what a step computes stays with the
experiment. So neither loader, optimizer nor loss is handed to it, and what it would do to them does
not happen: dealing out batches, dividing the loss by the steps of accumulation, clipping, its
autocast around the model, equal random numbers for all processes. Plain data parallelism is its
own. Sharding is that of the strategies `fsdp` and `deepspeed` with its settings, because it would
have processes hold the whole model first, find layers by the class names of transformers, and sum
gradients in 16 bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.config import Tree
from trainer.errors import ConfigError, MissingExtra
from trainer.strategies import Strategy, ddp, deepspeed, fsdp
from trainer.strategies.world import World

if TYPE_CHECKING:
    import accelerate

logger = logging.getLogger(__name__)

_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")
_KINDS = (*_DDP, "FSDP", "DEEPSPEED")
_MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_DEEPSPEED_JSON = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
# What a run here cannot do, by the variable that asks for it: the values that ask for nothing, and
# what to do instead.
_DATA_PARALLEL = (("1",), "leave it out; a run is data parallel only")
_REFUSED = {
    "ACCELERATE_DYNAMO_BACKEND": (
        ("no",),
        "leave it out; training.compile=true compiles each layer",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "choose FSDP or DEEPSPEED as distributed_type"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("1", "auto"),
        "set it to auto; it follows from the sizes of batches",
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
    """Splits the run as Hugging Face Accelerate is asked to: DDP, FSDP or DeepSpeed.

    Attributes:
        config: a file that `accelerate config` has written; None takes what `accelerate launch`
            hands on, and DDP where it was not used.
    """

    config: str | None = None

    def check(self, experiment: Tree) -> None:
        with self._environment():
            if clashes := [*_refused(), *_contradictions(experiment["training"])]:
                raise ConfigError(
                    f"Accelerate is asked for what this run is not: {'; '.join(clashes)}"
                )
            if _asked_for() == "DEEPSPEED":
                zero = _zero()
                zero.check({**experiment, "strategy": asdict(zero)})

    def build(self, accelerator: Accelerator, world: World, precision: Precision) -> Strategy:
        with self._environment():
            kind = _asked_for()
            made = _make(kind, accelerator, world)
            if kind == "FSDP":
                return _fsdp(made, world).build(accelerator, world, precision)
            if kind == "DEEPSPEED":
                return _zero().build(accelerator, world, precision)
            return Accelerated(accelerator, world, precision, made)

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Has the variables set that Accelerate takes its settings from."""
        try:
            from accelerate.utils import patch_environment
        except ImportError:
            raise MissingExtra("accelerate", "accelerate", "strategy accelerate") from None
        settings = {} if self.config is None else _settings_of(self.config)
        with patch_environment(
            **settings, OMP_NUM_THREADS=torch.get_num_threads()
        ):  # else Accelerate chooses that
            yield


class Accelerated(ddp.DataParallel):
    """Data parallel, in the wrapper that Accelerate puts around the model."""

    kind: ClassVar[str] = "accelerate"

    def __init__(
        self,
        accelerator: Accelerator,
        world: World,
        precision: Precision,
        made: accelerate.Accelerator,
    ) -> None:
        super().__init__(accelerator, world, precision, ddp.Config())
        self._made = made

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped: nn.Module = self._made.prepare_model(model)
        return wrapped

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        return (
            nullcontext()
            if last
            else cast(AbstractContextManager[object], self._made.no_sync(self._wrapped))
        )


def _settings_of(file: str) -> dict[str, str]:
    """What `accelerate launch --config_file FILE` would put into the environment of the processes,
    by its own code.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ConfigError(
            "accelerate launch has started this run with settings of its own, and strategy.config "
            f"is {file}; leave "
            "out one of the two"
        )
    others = [
        "--num_machines=1",
        "--num_processes=1",
        "--main_process_port=0",
    ]  # the business of who starts processes
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
    except Exception as error:  # of whatever type its reader meets a bad file with
        raise ConfigError(
            f"strategy.config: Accelerate cannot take {file} ({type(error).__name__}: {error}); "
            "write one with "
            "`accelerate config --config_file FILE`"
        ) from error
    if kind not in _KINDS or defaults.compute_environment.value != "LOCAL_MACHINE":
        raise ConfigError(
            f"strategy.config: {file} is for {kind} on {defaults.compute_environment.value}, and "
            "samestep runs "
            f"{', '.join(_KINDS)} on LOCAL_MACHINE; write one of these with `accelerate config`"
        )
    return {name: value for name, value in found.items() if name.startswith(_PREFIXES)}


def _asked_for() -> str:
    """DEEPSPEED, FSDP, MEGATRON_LM (which is refused), else DDP."""
    from accelerate.utils import parse_flag_from_env

    kinds = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
    return next((kind for kind in kinds if parse_flag_from_env(f"ACCELERATE_USE_{kind}")), "DDP")


def _refused() -> Iterator[str]:
    """What Accelerate is asked for and no run here can do."""
    for name, (fine, fix) in _REFUSED.items():
        if (value := os.environ.get(name, fine[0])).lower() not in fine:
            yield f"{name}={value}: {fix}"


def _contradictions(training: Tree) -> Iterator[str]:
    """What Accelerate is asked for and the experiment says otherwise.

    A DeepSpeed JSON is checked on its own.
    """
    from accelerate.utils import parse_flag_from_env

    precision, norm = training["precision"], training["max_grad_norm"]
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION")
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    unsaid = {None, "no"} if _DEEPSPEED_JSON in os.environ else {None}  # the JSON says it then
    if mixed not in unsaid | {_MIXED_PRECISION[precision]}:
        yield f"mixed_precision is {mixed} and training.precision {precision}: change one of them"
    if clipping != "auto" and float(clipping) != (norm or 0):
        yield f"gradient_clipping is {clipping} and training.max_grad_norm {norm}: set it to auto"
    if (
        parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
        and not training["activation_checkpointing"]
    ):
        yield "fsdp_activation_checkpointing is on: set training.activation_checkpointing=true, too"


def _make(kind: str, accelerator: Accelerator, world: World) -> accelerate.Accelerator:
    """Accelerate's own object, of the processes that have met already.

    Raises:
        ConfigError: Accelerate makes something else than it was asked for.
    """
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

    device = accelerator.device
    on_cpu = device.type == "cpu"
    if (
        "RANK" not in os.environ
        and "MASTER_ADDR" in os.environ
        and "ACCELERATE_USE_CPU" in os.environ
    ):
        raise ConfigError(
            "accelerate launch was asked for several processes and has started this one without a "
            "RANK, as it does on "
            "CPUs; append `--processes N` to the command of samestep, or use torchrun"
        )
    fix = "start the run with accelerate launch or torchrun"
    if on_cpu and kind in ("FSDP", "DEEPSPEED"):
        fix = f"set strategy={kind.lower()}, which shards on CPUs, too"
    try:
        made = accelerate.Accelerator(
            cpu=on_cpu,
            mixed_precision="no",  # autocast is ours
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except Exception as error:  # of whatever type it meets settings with
        raise ConfigError(
            f"{kind} was asked for, and Accelerate cannot make it here: {error}; {fix}"
        ) from error
    found = made.distributed_type.value
    if found not in (_DDP if kind == "DDP" else (kind,)):
        raise ConfigError(
            f"{kind} was asked for, and Accelerate makes {found} of it on this {device.type}; {fix}"
        )
    if (made.device.type, made.device.index or 0) != (device.type, device.index or 0):
        raise ConfigError(
            f"Accelerate takes {made.device} and this run {device}; set "
            f"accelerator={made.device.type}"
        )
    if made.num_processes != world.size:
        raise ConfigError(
            f"Accelerate sees {made.num_processes} processes and this run {world.size}; start it "
            "with accelerate "
            "launch, torchrun or --processes, which tell each process its number"
        )
    return made


def _fsdp(made: accelerate.Accelerator, world: World) -> fsdp.Config:
    """FSDP's settings.

    Version 1 is run as version 2, which cuts parameters otherwise and computes the same.
    """
    plugin, parallelism = made.state.fsdp_plugin, made.parallelism_config
    if plugin.fsdp_version == 2:
        return fsdp.Config(
            1 if parallelism is None else parallelism.dp_replicate_size,
            plugin.reshard_after_forward,
        )
    sharding = plugin.sharding_strategy.name
    logger.info("accelerate   FSDP1 with %s runs as FSDP2", sharding)
    nodes = world.size // int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    replicas = nodes if "HYBRID" in sharding else world.size if sharding == "NO_SHARD" else 1
    return fsdp.Config(replicas, reshard_after_forward=sharding in ("FULL_SHARD", "HYBRID_SHARD"))


def _zero() -> deepspeed.Config:
    """DeepSpeed's settings, those of its JSON included."""
    from accelerate.utils import DeepSpeedPlugin

    try:
        plugin = DeepSpeedPlugin()
    except Exception as error:  # of whatever type it meets settings with
        raise ConfigError(f"Accelerate cannot take these settings of DeepSpeed: {error}") from error
    if plugin.zero_stage not in (1, 2, 3):
        raise ConfigError(
            f"zero_stage is {plugin.zero_stage}, and ZeRO has the stages 1, 2 and 3; where nothing "
            "is to be split, "
            "choose MULTI_GPU as distributed_type"
        )
    return deepspeed.Config(
        stage=plugin.zero_stage,
        offload_optimizer=plugin.offload_optimizer_device == "cpu",
        offload_parameters=plugin.offload_param_device == "cpu",
        config=os.environ.get(_DEEPSPEED_JSON),
    )
