"""The teacher of a distillation: a trained model that stays as it is, beside the student, on each device."""

from __future__ import annotations

from typing import cast

import torch

from data_pipeline.reading.mixed_dataset import AnyDataset
from trainer.errors import ConfigError
from trainer.models import Model, ModelConfig
from trainer.objectives import Objective, Taught
from trainer.strategies import Strategy
from trainer.training.compatibility import check_one_text
from trainer.training.experiment import Experiment
from trainer.training.initial_weights import stored_values
from trainer.training.weights import Weights, load_weights


def attach_teacher(
    experiment: Experiment, dataset: AnyDataset, objective: Objective, strategy: Strategy
) -> Weights | None:
    """Loads the teacher of an objective that has one.

    With several ranks this is collective.

    Returns:
        Its weights; None where the objective has no teacher.

    Raises:
        CheckpointError: there are no such weights.
        ConfigError: they are of a model that cannot teach the student, or were trained with another tokenizer.
    """
    name = experiment.objective.teacher_path
    if name is None:
        return None
    weights = load_weights(name, strategy.world.rank, strategy.world.size)
    model = build_teacher(experiment, weights.config)
    values = stored_values(weights, model, dataset)
    with strategy.accelerator.graph("start"):
        cast(Taught, objective).attach(strategy.place_frozen(model, values))
    return weights


def build_teacher(experiment: Experiment, config: ModelConfig) -> Model:
    """The teacher on the meta device: its parameters have no values yet.

    Args:
        experiment: of the student.
        config: of the teacher, the `Config` of a module in trainer/models.

    Raises:
        ConfigError: what the two models predict, or the hidden states to compare, have nothing in common; the
            sequences of the run are not for the teacher.
    """
    with torch.device("meta"):
        model = config.build()
    own, name = experiment.model, experiment.objective.teacher_path
    facts = ["head", "labels", "causal", "prefix_lm", "encoder_decoder"]
    facts += ["vocab_size"] if own.head == "language_model" else []
    facts += ["width"] if experiment.objective.compares_hidden else []
    for setting in facts:
        mine, theirs = (_shown(getattr(each, setting)) for each in (own, config))
        if mine != theirs:
            raise ConfigError(
                f"the teacher {name} has {setting} {theirs}, and model.{setting} is {mine}; "
                + ("set objective.cosine=0, or " if setting == "width" else "")
                + "give the student what its teacher has, or name another teacher"
            )
    longest = max(phase.sequence_length for phase in experiment.resolved_phases())
    if longest > model.max_sequence_length:
        raise ConfigError(
            f"the teacher {name} reads {model.max_sequence_length} tokens, and the run has sequences of {longest}; set "
            f"data.sequence_length={model.max_sequence_length} or less, or name another teacher"
        )
    check_one_text(experiment, config.virtual_tokens, f"the teacher {name}", "name another teacher")
    if experiment.training.compile:
        for unit in model.sharding_units():
            unit.compile()
    return model


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
