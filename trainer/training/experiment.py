"""The root of the configuration: one file describes one run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from data_pipeline.reading.config import Config as DataConfig
from samestep.config import Kinds
from samestep.errors import ConfigError
from trainer import accelerators, optim, strategies
from trainer.checkpoint import manager
from trainer.models import Model, ModelConfig
from trainer.monitoring import TensorBoard, WeightsAndBiases
from trainer.objectives import ObjectiveConfig
from trainer.optim import schedules
from trainer.strategies.kinds import fsdp
from trainer.training.observers.settings import Probe, Profile
from trainer.training.phases import Config as PhaseConfig
from trainer.training.phases import Phase, resolve
from trainer.training.settings import Config as TrainingConfig


@dataclass(frozen=True)
class Tracking:
    """Where metrics go besides RUN/metrics.jsonl, which is always written.

    Attributes:
        wandb: Weights & Biases; None leaves it out.
        tensorboard: TensorBoard; None leaves it out, {} turns it on.
        profile: the steps to trace with the PyTorch profiler.
    """

    wandb: WeightsAndBiases | None = None
    tensorboard: TensorBoard | None = None
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True)
class Experiment:
    """One run: what is trained, on what data, how, and where the results go.

    Attributes:
        output: the run's folder; a run found there is continued from its newest checkpoint.
        model: the architecture (a module of trainer/models); with `init_from`, only the settings
            that differ from those weights.
        objective: what is predicted (a module of trainer/objectives).
        data: the dataset that `samestep data build` made, and how it is split into examples.
        training: steps, batch sizes, precision.
        phases: consecutive parts of the run with a sequence length, batch size, learning rate or
            objective of their own; without any, the run is one phase.
        probes: small tasks, by name, on which the hidden states are scored during the run.
        optimizer: a module of trainer/optim with a `Config`.
        schedule: the learning rate over the run.
        strategy: how the model is split over processes (a module of trainer/strategies).
        accelerator: the hardware (a module of trainer/accelerators); None takes a GPU if there is
            one, else a TPU, else the CPU, and logs which.
        checkpoint: how often to save and what to keep.
        tracking: Weights & Biases, TensorBoard, profiles.
        seed: the root of every random choice.
        init_from: the weights that the run starts from: a Hugging Face folder,
            hf://NAME[@REVISION] on the Hub, or a checkpoint; None initializes them at random.
        init_layers: the layers of `init_from` that the model's layers start from, in order, as
            [0, 2, 4, 6, 8, 10]; of T5, in both stacks. [] takes all layers as they are.
        redraw_layers: number of last layers to initialize at random in spite of `init_from`.
        init_embeddings: a folder of `samestep vectors --units tokens`, whose vectors the token
            embeddings start from; tokens without a vector start at random. Without `init_from`.
        frozen: parameters that keep the values of `init_from`: names, or the beginnings of names
            up to a dot, as embeddings, layers.0 or encoder. Checkpoints leave them out, like the
            parameters that `model.peft` freezes.
    """

    output: str
    model: Annotated[ModelConfig, Kinds("trainer.models.families")]
    objective: Annotated[ObjectiveConfig, Kinds("trainer.objectives.kinds")]
    data: DataConfig
    training: TrainingConfig
    optimizer: Annotated[optim.Config, Kinds("trainer.optim.kinds")]
    schedule: schedules.Schedule = field(default_factory=schedules.Schedule)
    phases: tuple[PhaseConfig, ...] = ()
    probes: dict[str, Probe] = field(default_factory=dict)
    strategy: Annotated[strategies.Config, Kinds("trainer.strategies.kinds")] = field(
        default_factory=fsdp.Config
    )
    accelerator: Annotated[accelerators.Config, Kinds("trainer.accelerators.kinds")] | None = None
    checkpoint: manager.Config = field(default_factory=manager.Config)
    tracking: Tracking = field(default_factory=Tracking)
    seed: int = 0
    init_from: str | None = None
    init_layers: tuple[int, ...] = ()
    redraw_layers: int = 0
    init_embeddings: str | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Seeds of phases are 32 bits of a hash; the run's own seed is one of the same kind.
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must lie in 0 .. 2**32 - 1, not {self.seed}")
        # Rows are appended to files there, which object stores cannot do.
        if "://" in self.output:
            raise ConfigError(
                f"output {self.output!r} is not a folder of a file system; name one, and let "
                "checkpoint.folder be the address that checkpoints go to"
            )
        if self.redraw_layers < 0 or (self.redraw_layers and self.init_from is None):
            raise ConfigError(
                f"redraw_layers is {self.redraw_layers}; use 0, or set init_from as well"
            )
        if self.init_layers:
            self._check_init_layers()
        # One source for each parameter: the order of two would decide silently.
        if self.init_embeddings is not None and self.init_from is not None:
            raise ConfigError(
                f"init_embeddings is {self.init_embeddings}, and init_from has embeddings, too. "
                "Remove one of the two."
            )
        # Checkpoints leave frozen parameters out, so a resumed run reads their values there again.
        if self.freezes and self.init_from is None:
            setting = "frozen" if self.frozen else "model.peft"
            raise ConfigError(
                f"{setting} freezes parameters at the values of init_from, which is not set. Set "
                f"init_from, or remove {setting}."
            )
        phases = self.resolved_phases()  # rejects phases that contradict the run
        if self.data.group_by_source is not None:
            self._check_source_groups(phases, self.data.group_by_source)
        if self.training.is_bitwise:
            self._check_bitwise(phases)
        for index, phase in enumerate(self.phases):
            # One teacher for a run: its weights are part of the run's identity.
            if phase.objective is not None and phase.objective.teacher_path is not None:
                raise ConfigError(
                    f"phases.{index}.objective learns from a teacher, which only the run's own "
                    "objective may; set it as objective, and name the objectives of other phases"
                )

    def _check_source_groups(self, phases: Sequence[Phase], group: int) -> None:
        for phase in phases:
            size = phase.global_batch_size
            if size % group:
                where = "" if len(phases) == 1 else f" of phase {phase.index}"
                raise ConfigError(
                    f"data.group_by_source is {group}, and does not divide global_batch_size "
                    f"{size}{where}. Set data.group_by_source to {size} or a divisor of it, or the "
                    f"batch size to {-(-size // group) * group}."
                )

    def _check_bitwise(self, phases: Sequence[Phase]) -> None:
        from trainer.partition import exact

        if not self.strategy.supports_exact:
            raise ConfigError(
                "training.exact is bitwise, which strategy single, ddp and fsdp (with replicas for "
                "HSDP) can be. Use one of these, or set training.exact=tolerance."
            )
        fix = "{kind: cpu, threads: 1}" if self.accelerator is None else self.accelerator.varies
        if fix is not None:
            raise ConfigError(
                "training.exact is bitwise, and the accelerator's results may vary with the number "
                f"of processes, or by chance. Set accelerator, such as accelerator={fix}."
            )
        for phase in phases:
            size = phase.micro_batch_size
            # A unit is a micro-batch, and its size decides the bits, so memory must not choose it.
            if size == "auto":
                raise ConfigError(
                    "training.exact is bitwise, and micro_batch_size is auto. Set the number of "
                    "examples of a unit, which all devices can compute, as "
                    "training.micro_batch_size=8."
                )
            # Words of fp64 hold a sum of `MOST_UNITS` units without rounding.
            if phase.global_batch_size > size * exact.MOST_UNITS:
                raise ConfigError(
                    f"training.exact is bitwise, and global_batch_size {phase.global_batch_size} "
                    f"has more than {exact.MOST_UNITS} units of {size}. Use a larger "
                    "micro_batch_size."
                )
            units = -(-phase.global_batch_size // size)
            if self.training.log_every * units > exact.MOST_METRICS:
                raise ConfigError(
                    f"training.exact is bitwise, and log_every {self.training.log_every} adds up "
                    f"the losses of more than {exact.MOST_METRICS:,} units. Use at most "
                    f"{exact.MOST_METRICS // units}."
                )

    @property
    def freezes(self) -> bool:
        """Whether some parameters keep the values of `init_from`."""
        return bool(self.frozen) or self.model.peft is not None

    def build_model(self) -> Model:
        """Builds the model; frozen parameters require no gradient. Use the meta device.

        Raises:
            ConfigError: `frozen` names no parameter, or no parameter is left to train.
        """
        model = self.model.build()
        model.use_dropout_version(self.training.dropout_version)
        named = dict(model.named_parameters())
        for prefix in self.frozen:
            # The dots keep layers.1 from freezing layers.10.
            dotted = f"{prefix.removesuffix('.')}."
            chosen = [name for name in named if f"{name}.".startswith(dotted)]
            if not chosen:
                raise ConfigError(
                    f"frozen has {prefix!r}, and no parameter is called so; use "
                    f"{', '.join(_similar_prefixes(prefix, model))}"
                )
            for name in chosen:
                named[name].requires_grad_(False)
        if not any(parameter.requires_grad for parameter in named.values()):
            raise ConfigError(
                "every parameter is frozen, so there is nothing to train; name fewer in frozen"
            )
        return model

    def _check_init_layers(self) -> None:
        setting = f"init_layers is {list(self.init_layers)}"
        if self.init_from is None:
            raise ConfigError(
                f"{setting}, which are layers of init_from, and there is none; leave init_layers "
                "out"
            )
        depths = {"layers": self.model.layers, "decoder_layers": self.model.decoder_layers}
        for name, layers in depths.items():
            if layers and layers != len(self.init_layers):
                raise ConfigError(
                    f"{setting}, and model.{name} is {layers}; name a layer for each, or set "
                    f"model.{name}={len(self.init_layers)}"
                )
        if self.freezes:
            raise ConfigError(
                f"{setting}, and frozen parameters are read from init_from as they are there; "
                "leave init_layers out, or freeze nothing"
            )

    def in_one_process(self) -> Experiment:
        """Returns the experiment with a strategy that works in one process."""
        if self.strategy.fits_one_process(self.accelerator):
            return self
        from trainer.strategies.kinds import single

        return replace(self, strategy=single.Config())

    def resolved_phases(self) -> tuple[Phase, ...]:
        """Returns the phases with all their settings; at least one.

        Raises:
            ConfigError: their steps do not add up to the run's, or a warm-up is too long.
        """
        return resolve(
            self.phases,
            steps=self.training.steps,
            sequence_length=self.data.sequence_length,
            global_batch_size=self.training.global_batch_size,
            micro_batch_size=self.training.micro_batch_size,
            schedule=self.schedule,
            objective=self.objective,
        )


def _similar_prefixes(prefix: str, model: Model) -> list[str]:
    """Names of parameters and of modules with parameters, like `prefix`; else the outermost."""
    known = set()
    for name, _ in model.named_parameters():
        parts = name.split(".")
        known |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return difflib.get_close_matches(prefix, sorted(known), n=3) or sorted(model._modules)
