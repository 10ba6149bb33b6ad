"""Checks that the dataset, the objective and the model of a run are compatible."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

from data_pipeline.packing.policy import check_rows
from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from samestep.config import kind_name, to_tree
from samestep.errors import ConfigError
from trainer.accelerators import Accelerator
from trainer.models import Model, Outputs
from trainer.models.config import FEWEST_LABELS
from trainer.objectives import Objective, OverBatch, Task
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)

_HEAD = "model.head="


def check_compatibility(
    experiment: Experiment, dataset: AnyDataset, objectives: Sequence[Objective], model: Model
) -> None:
    """Rejects a model that is too small for the dataset, or made for other objectives.

    Args:
        objectives: of each phase.

    Raises:
        ConfigError: names the settings that contradict each other.
        DataError: the dataset holds other rows than the objective reads.
    """
    phases = experiment.resolved_phases()
    # First: every other message would send a user with the wrong dataset astray.
    for phase, objective in zip(phases, objectives, strict=True):
        check_dataset(dataset, objective, phase.sequence_length)
    config, packing = experiment.model, experiment.data.packing
    vocabulary = dataset.tokenizer.vocabulary.size
    if vocabulary > config.vocab_size:
        raise ConfigError(
            f"the dataset {dataset.name} has a vocabulary of {vocabulary} and model.vocab_size is "
            f"{config.vocab_size}; set model.vocab_size to {vocabulary} or more"
        )
    if config.vocab_size > 1.25 * vocabulary:  # more than padding to a multiple
        logger.warning(
            "the dataset has %s of the %s tokens of model.vocab_size; a smaller one saves memory",
            f"{vocabulary:,}",
            f"{config.vocab_size:,}",
        )
    check_lengths(experiment, objectives, model)
    # As plain values: a strategy knows no class of the experiment, which contains its own.
    experiment.strategy.check(to_tree(experiment))
    for phase, objective in zip(phases, objectives, strict=True):
        check_needs(replace(experiment, objective=phase.objective), objective, model)
    _check_labels(experiment, dataset)
    _check_start_token(experiment, dataset)
    check_virtual_tokens(packing, config.virtual_tokens, "model.peft", "model.peft=lora")
    # Without two types, the model could not tell the segments of a pair apart.
    if packing == "pairs" and config.type_vocab < 2:
        has = "the model has none; use another packing"
        if config.type_vocab:
            has = f"model.type_vocab is {config.type_vocab}; set it to 2"
        raise ConfigError(f"data.packing pairs marks two segments by token types, and {has}")


def check_precision(experiment: Experiment, accelerator: Accelerator) -> None:
    """Rejects 8-bit products on hardware without them.

    Raises:
        ConfigError: names the setting.
    """
    # When the hardware is known: a plan or a check may run on a machine without it.
    if experiment.training.fp8 and not accelerator.has_fp8:
        raise ConfigError(
            f"training.fp8 is true, and {accelerator.description} has no 8-bit matrix products."
            " Set it to false, or use a GPU of compute capability 8.9 or above."
        )


def check_accelerator(experiment: Experiment, accelerator: Accelerator) -> None:
    """Rejects settings that a run cannot be trained with on this hardware.

    Raises:
        ConfigError: names the setting.
    """
    if experiment.data.group_by_length is not None and accelerator.compiles:
        raise ConfigError(
            f"{accelerator.description} compiles for each width of a batch, and "
            "data.group_by_length gives many; set it to null"
        )
    if experiment.training.digest_every is not None and accelerator.compiles:
        raise ConfigError(
            f"training.digest_every is set, and {accelerator.description} compiles a step into one "
            "graph, whose gradients nobody can read. Set it to null."
        )


def check_exact(
    experiment: Experiment, objectives: Sequence[Objective], own_optimizer: bool
) -> None:
    """Rejects what does not compute the same bits on other numbers of devices.

    Args:
        own_optimizer: whether the optimizer is built by the caller's own function.

    Raises:
        ConfigError: names the setting.
    """
    if not experiment.training.is_bitwise:
        return
    if any(isinstance(objective, OverBatch) for objective in objectives):
        raise ConfigError(
            "training.exact is bitwise, and this objective compares the examples of all devices, "
            "whose number changes the shapes. Set training.exact=tolerance."
        )
    if own_optimizer:
        raise ConfigError(
            "training.exact is bitwise, which holds for samestep's optimizers. Leave "
            "build_optimizer out, or set training.exact=tolerance."
        )


def check_dataset(dataset: AnyDataset, objective: Objective, sequence_length: int) -> None:
    """Rejects a dataset of documents for a task's objective, or of another task's rows.

    Raises:
        DataError: names the dataset and what the objective reads.
    """
    spec = objective.pack_spec(sequence_length)
    # All sources of a mixture have to hold what the objective reads.
    for source in named_sources(dataset).values():
        check_rows(source.manifest, source.name, spec)


_SIDES = ("objective.query_length", "objective.passage_length")


def check_lengths(experiment: Experiment, objectives: Sequence[Objective], model: Model) -> None:
    """Rejects sequences longer than the model's position table.

    Args:
        objectives: of each phase.

    Raises:
        ConfigError: names the setting of the length.
    """
    virtual, most = experiment.model.virtual_tokens, model.max_sequence_length
    without = f", without the {virtual} positions of model.peft" if virtual else ""
    for phase, objective in zip(experiment.resolved_phases(), objectives, strict=True):
        length = phase.sequence_length
        spec = objective.pack_spec(length)
        sides, parts = spec.sides, spec.parts
        # A decoder beside an encoder has a table of its own.
        targets = 0 if sides is None or sides.joined else sides.size[1]
        if targets > most:
            raise ConfigError(
                f"targets of {targets} tokens are over the model's position table of {most}"
                f"{without}; use shorter ones, or set model.max_positions to {targets + virtual} "
                "or more"
            )
        name = "data.sequence_length"
        if parts is not None and parts.layout == "separate":
            # Sequences that are packed into a row have positions of their own.
            limits = parts.query_length or length, parts.passage_length or length
            if max(limits) < length:
                length, name = max(zip(limits, _SIDES, strict=True))
        if length <= most:
            continue
        own = experiment.phases and experiment.phases[phase.index].sequence_length is not None
        if own and name not in _SIDES:
            name = f"phases.{phase.index}.sequence_length"
        raise ConfigError(
            f"{name} {length} is over the model's position table of {most}{without}; use a shorter "
            f"sequence, or set model.max_positions to {length + virtual} or more"
        )


def check_virtual_tokens(packing: str, virtual: int, name: str, instead: str) -> None:
    """Rejects `virtual` positions before each row if a row can hold several packed sequences.

    Args:
        name: whose positions they are, for the message.
        instead: what to set instead, for the message.

    Raises:
        ConfigError: names the packing.
    """
    if virtual and packing not in ("padded", "pairs"):
        raise ConfigError(
            f"{name} puts {virtual} positions before each sequence, and data.packing {packing} "
            f"packs several sequences into an example; set data.packing=padded, or {instead}"
        )


def check_best(experiment: Experiment, objectives: Sequence[Objective]) -> None:
    """Rejects a best score that a task's evaluations do not have.

    Only tasks know the names of their scores in advance; for other objectives and for distilled
    tasks, the first evaluation raises the error.

    Raises:
        ConfigError: names the scores.
    """
    best, retrieval = experiment.training.best, experiment.training.retrieval
    added = () if retrieval is None else retrieval.measures
    for phase, objective in zip(experiment.resolved_phases(), objectives, strict=True):
        # A distilled task has further scores, which depend on the teacher.
        own = phase.objective.task is phase.objective
        if best is not None and isinstance(objective, Task) and own:
            known = (*objective.mean_names, *objective.score_names, *added)
            best.check(tuple(dict.fromkeys(known)))


def check_needs(experiment: Experiment, objective: Objective, model: Model) -> None:
    """Rejects a model without the outputs that the objective needs, or with untrained parts.

    Raises:
        ConfigError: names the missing output, the untrained part or the missing column.
    """
    named_model = f"the model, {kind_name(experiment.model)},"
    named_objective = f"the objective, {kind_name(experiment.objective.task)},"
    missing = objective.needs - model.offers
    if objective.predicts in missing:
        missing = frozenset({objective.predicts})  # the right head may bring the rest
    if missing:
        offers = sorted(name for name in model.offers if "." not in name)
        raise ConfigError(
            f"{named_objective} needs {', '.join(sorted(missing))}, and {named_model} offers "
            f"{', '.join(offers)}; {_fixes(experiment, objective, model, missing)}"
        )
    # Parameters without a gradient would stay at their initial values.
    if untrained := sorted(model.trains.keys() - objective.needs):
        setting = model.trains[untrained[0]]
        raise ConfigError(
            f"{named_model} has parameters for {untrained[0]}, which {named_objective} does not "
            f"train; {f'set {setting}, or ' if setting else ''}choose another objective"
        )
    if absent := sorted(model.reads_for(objective.needs) - objective.columns):
        raise ConfigError(
            f"{named_model} reads the column {absent[0]}, which {named_objective} does not make; "
            "choose another model or objective"
        )


def _fixes(experiment: Experiment, objective: Objective, model: Model, missing: Outputs) -> str:
    """Says how to get outputs that a model does not offer."""
    offered_by = experiment.model.settings_for
    # Settings of the model first, as they keep the objective that the user chose.
    settings = [offered_by[name] for name in sorted(missing) if name in offered_by]
    if objective.predicts not in missing:  # it has the right head
        settings = [setting for setting in settings if not setting.startswith(_HEAD)]
    settings += experiment.objective.adapted(missing, model.offers)
    fixes = [f"set {' or '.join(settings)}"] if settings else []
    if any(setting.startswith(_HEAD) for setting in settings):
        fixes.append(
            "with init_from leave model.kind out, which gives the model of the weights that head"
        )
    return ", or ".join([*fixes, "choose another model or objective"])


def _check_labels(experiment: Experiment, dataset: AnyDataset) -> None:
    """Rejects a head with other labels than the dataset's, and an objective that needs others."""
    model = experiment.model
    for index, source in enumerate(named_sources(dataset).values()):
        labels = () if source.manifest.task is None else source.manifest.task.labels
        for phase in experiment.resolved_phases():
            objective = phase.objective.task
            objective.check_labels(labels)
            if objective.needs_scores and not source.manifest.scored:
                raise ConfigError(
                    f"{objective.needs_scores} compares with a teacher's scores, and "
                    f"{source.name} has none. Build it from rows with scores, or leave it out."
                )
        if not labels and model.head == "classification":  # ranking
            if len(model.labels) > 1:
                raise ConfigError(
                    f"model.labels is {', '.join(model.labels)}, and a passage has one score. Set "
                    "model.labels='[\"score\"]'."
                )
            continue  # whatever the name of the score
        # The head's outputs are numbered like the labels: another order would train another task.
        if model.head in FEWEST_LABELS and labels != model.labels:
            fix = f"set model.labels='{json.dumps(labels)}', in this order"
            if len(model.labels) > 1:
                build = f"build the dataset again with source.labels='{json.dumps(model.labels)}'"
                # In a mixture, the datasets before this one have the model's labels.
                fix = build if index else f"{fix}, or {build}"
            raise ConfigError(
                f"the labels of {source.name} are {', '.join(labels)}, and model.labels is "
                f"{', '.join(model.labels)}; {fix}"
            )


def _check_start_token(experiment: Experiment, dataset: AnyDataset) -> None:
    """Rejects a tokenizer without the token that a decoder starts with."""
    model, vocabulary = experiment.model, dataset.tokenizer.vocabulary
    pad, end = vocabulary.pad, vocabulary.end
    # BART's decoder reads the token that ends texts first, before targets as well.
    if model.sets_start and model.start_token not in (pad, end):
        raise ConfigError(
            f"model.start_token is {model.start_token}, and in {dataset.name} it is neither the "
            f"token that ends a text nor padding; set model.start_token={end}"
        )
    if model.sets_start:
        return
    # T5's decoder reads the padding token first, by an id that is a fact of the family.
    if model.head != "language_model" and model.decoder and model.start_token not in (None, pad):
        raise ConfigError(
            f"the decoder of {kind_name(model)} begins with the padding token, of id "
            f"{model.start_token}, and in {dataset.name} its id is {pad}; build the dataset with "
            "T5's tokenizer, or one of algorithm unigram"
        )
