"""The teacher of a distillation, or a guide: a trained model, frozen, beside the run's own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import ConfigError
from trainer.accelerators import Accelerator
from trainer.models import Model, ModelConfig, give_spellings
from trainer.objectives import Objective, Taught
from trainer.strategies import Strategy
from trainer.training.compatibility import check_virtual_tokens
from trainer.training.compute.compiled import compile_units
from trainer.training.compute.fused_attention import fuse_attention
from trainer.training.experiment import Experiment
from trainer.training.weights.initial import stored_values
from trainer.training.weights.label_order import is_reordered
from trainer.training.weights.loading import load_weights, shared_identity


def attach_teacher(
    name: str,
    experiment: Experiment,
    dataset: AnyDataset,
    objectives: Iterable[Objective],
    strategy: Strategy,
) -> str:
    """Loads the teacher of an objective and gives it to the objectives. Collective.

    Returns:
        The identity of the teacher's weights.

    Raises:
        CheckpointError: there are no such weights.
        ConfigError: their model cannot teach the student, or has another tokenizer.
    """
    weights = load_weights(name, strategy.world.rank, strategy.world.size)
    model = build_teacher(experiment, weights.config, strategy.accelerator)
    give_spellings(model, dataset.tokenizer.spellings)
    precision, world = experiment.training.precision, strategy.world
    fuse_attention(model, strategy.accelerator, precision, world.size)
    values = stored_values(weights, model, dataset)
    with strategy.accelerator.graph("start"):
        teacher = strategy.place_frozen(model, values)
    for objective in objectives:
        if isinstance(objective, Taught):
            objective.attach(teacher)
    return shared_identity(weights, strategy.world.rank, strategy.world.size)


def build_teacher(
    experiment: Experiment, config: ModelConfig, accelerator: Accelerator | None = None
) -> Model:
    """Builds the teacher on the meta device: its parameters have no values yet.

    Args:
        experiment: of the student.
        config: of the teacher.
        accelerator: see `build_model`.

    Raises:
        ConfigError: the outputs or hidden states of the two models cannot be compared, a guide does
            not embed texts, or the run's sequences are not for the teacher.
    """
    student, objective = experiment.model, experiment.objective
    name = objective.teacher_path
    if is_reordered(config.labels, student.labels):
        config = config.with_settings(labels=student.labels)
    with torch.device("meta"):
        model = config.build()
    if objective.teacher_embeds:
        _check_embeds(f"{name}, which objective.{objective.teacher_setting} names,", config, model)
    else:
        _check_comparable(experiment, config, model)
    longest = max(
        objective.longest_text(phase.sequence_length) for phase in experiment.resolved_phases()
    )
    most = model.max_sequence_length
    if longest > most:
        raise ConfigError(
            f"the teacher {name} reads {most} tokens, and the run has sequences of {longest}; set "
            f"data.sequence_length={most} or less, or name another teacher"
        )
    packing = experiment.data.packing
    check_virtual_tokens(
        packing, config.virtual_tokens, f"the teacher {name}", "name another teacher"
    )
    if experiment.training.compile and accelerator is not None:
        compile_units(model, accelerator, experiment.data.group_by_length is not None)
    return model


def _check_embeds(name: str, config: ModelConfig, model: Model) -> None:
    """Rejects a guide that embeds no texts, or reads more than these."""
    if "embedding" not in model.offers:
        raise ConfigError(
            f"{name} has head {config.head} and embeds no texts. Name a folder of "
            "sentence-transformers, or a run with head=embedding"
        )
    if columns := model.reads_for(frozenset({"embedding"})):
        raise ConfigError(f"{name} reads {min(columns)} besides tokens. Name another encoder")


def _check_comparable(experiment: Experiment, config: ModelConfig, model: Model) -> None:
    """Rejects a teacher with outputs or hidden states that are not like the student's."""
    student, name = experiment.model, experiment.objective.teacher_path
    # Both models get the same batch, and their outputs are compared position by position.
    settings = ["head", "labels", "causal", "prefix_lm", "encoder_decoder"]
    if student.head == "language_model":
        settings.append("vocab_size")
    if experiment.objective.compares_hidden:
        settings.append("width")
    pairs = experiment.objective.layer_pairs
    if any(output.startswith("attention.") for output in pairs):
        settings.append("heads")
    for setting in settings:
        mine, theirs = _shown(getattr(student, setting)), _shown(getattr(config, setting))
        if mine != theirs:
            raise ConfigError(
                f"the teacher {name} has {setting} {theirs}, and model.{setting} is {mine}; "
                + ("set objective.cosine=0, or " if setting == "width" else "")
                + "give the student what its teacher has, or name another teacher"
            )
    if pairs and config.virtual_tokens + student.virtual_tokens:
        raise ConfigError(
            "layers are compared position by position, and model.peft of the student or the "
            "teacher adds positions; set objective.hidden=0 and objective.attention=0"
        )
    if missing := sorted(set(pairs.values()) - model.offers):
        raise ConfigError(
            f"the teacher {name} has no {missing[0]}, which objective.layer_map names; its layers "
            f"are 1 to {config.layers}, after the embeddings, 0"
        )
    wide = getattr(student, "teacher_width", 0) or student.width
    if "compared.0" in pairs and wide != config.width:
        raise ConfigError(
            f"the teacher {name} has width {config.width}, and the student's hidden states are "
            f"compared with width {wide}; set model.teacher_width={config.width}"
        )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
