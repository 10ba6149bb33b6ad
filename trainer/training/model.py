"""The model and the objectives of an experiment, checked against each other and the dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from samestep.errors import ConfigError
from trainer.accelerators import DTYPES, Accelerator
from trainer.models import Model, give_spellings
from trainer.objectives import Objective
from trainer.training.compatibility import check_compatibility
from trainer.training.experiment import Experiment


def build_objectives(experiment: Experiment, dataset: AnyDataset) -> list[Objective]:
    """Builds the objective of each phase. Phases with equal settings share one.

    Raises:
        ConfigError: the dataset's tokenizer lacks a token, or two phases cannot share a data order.
    """
    # The vocabulary comes from the data, so the objective masks with the tokens it was built with.
    vocabulary = dataset.tokenizer.vocabulary
    experiment = for_dataset(experiment, dataset)
    phases, objectives = experiment.resolved_phases(), list[Objective]()
    for phase in phases:
        equal = [
            other.index for other in phases[: phase.index] if other.objective == phase.objective
        ]
        if equal:
            objectives.append(objectives[equal[0]])
            continue
        objective = phase.objective.build(vocabulary)
        if l2 := experiment.model.scalar_mix_l2:
            from trainer.objectives.mix_penalty import with_penalty

            objective = with_penalty(objective, l2)
        objectives.append(objective)
    for before, phase in itertools.pairwise(phases):
        # A position in a data order counts examples, so its examples must be cut alike.
        length = phase.sequence_length
        old, new = (objectives[each.index].pack_spec(length) for each in (before, phase))
        if before.order == phase.order and old != new:
            raise ConfigError(
                f"phases.{phase.index} has another objective than the phase before it, which cuts "
                f"the text into other examples of {length} positions; let "
                f"phases.{phase.index}.sequence_length differ, or use an objective that reads "
                "text in the same way"
            )
    return objectives


def for_dataset(experiment: Experiment, dataset: AnyDataset) -> Experiment:
    """Replaces settings of objectives that depend on a dataset's labels: weights of classes.

    Raises:
        ConfigError: a setting contradicts the labels.
    """
    sources = named_sources(dataset)
    task = next(iter(sources.values())).manifest.task

    # Called for balanced weights only: it reads the labels of all training rows.
    def counts() -> list[int]:
        from data_pipeline.reading.label_counts import training_counts

        return training_counts(sources)

    return with_labels(experiment, () if task is None else task.labels, counts)


def with_labels(
    experiment: Experiment, labels: Sequence[str], counts: Callable[[], Sequence[int]] | None
) -> Experiment:
    """Calls `ObjectiveConfig.of_dataset` of every objective of an experiment."""
    phases = tuple(
        phase
        if phase.objective is None
        else replace(phase, objective=phase.objective.of_dataset(labels, counts))
        for phase in experiment.phases
    )
    objective = experiment.objective.of_dataset(labels, counts)
    return replace(experiment, objective=objective, phases=phases)


def build_model(
    experiment: Experiment,
    dataset: AnyDataset,
    objectives: Sequence[Objective],
    accelerator: Accelerator | None = None,
) -> Model:
    """Builds the model on the meta device: its parameters have no values yet.

    Args:
        accelerator: that computes it; None only checks, and compiles nothing.

    Raises:
        ConfigError: it is not compatible with the dataset or the objective of a phase.
    """
    with torch.device("meta"):
        model = experiment.build_model()
    own = [
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    ]
    # `to_empty` gives each module memory of its own, so a shared parameter would become two.
    if len(own) > len(set(own)):
        raise ConfigError(
            "two modules of the model share a parameter; let them share the module that has it"
        )
    check_compatibility(experiment, dataset, objectives, model)
    settings = experiment.training
    give_spellings(model, dataset.tokenizer.spellings)
    model.activation_checkpointing = settings.activation_checkpointing
    if settings.activation_checkpointing and not model.activation_checkpointing:
        raise ConfigError(
            "training.activation_checkpointing is true, and this model has no layers that can "
            "recompute; set it to false"
        )
    if settings.residual != "fp32":
        model.residual_dtype = DTYPES[settings.residual]
        if model.residual_dtype is None:
            raise ConfigError(
                f"training.residual is {settings.residual}, and this model has no norms or "
                "embeddings that support it. Set it to fp32."
            )
    if settings.fp8:
        from trainer.training.compute.float8 import use_float8

        use_float8(model)
    if settings.compile and accelerator is not None:
        from trainer.training.compute.compiled import compile_units

        compile_units(model, accelerator, experiment.data.group_by_length is not None)
    return model
