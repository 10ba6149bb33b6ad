"""Whether the parts of a run fit each other: dataset, objective, model, and weights to start from."""

from __future__ import annotations

import json
import logging

from data_pipeline.reading.mixed_dataset import AnyDataset, named_sources
from trainer.config import to_tree
from trainer.errors import ConfigError
from trainer.models import Model, Outputs
from trainer.models.config import FEWEST_LABELS
from trainer.objectives import Objective, Task
from trainer.training.best import check_metric
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)

_HEAD = "model.head="


def check_compatibility(
    experiment: Experiment, dataset: AnyDataset, objective: Objective, model: Model
) -> None:
    """Refuses a model that is too small for the dataset, or made for another objective.

    Raises:
        ConfigError: naming what does not fit.
    """
    vocabulary = dataset.tokenizer.vocabulary.size
    if vocabulary > experiment.model.vocab_size:
        raise ConfigError(
            f"the dataset {dataset.name} has a vocabulary of {vocabulary} and model.vocab_size is "
            f"{experiment.model.vocab_size}; set model.vocab_size to {vocabulary} or more"
        )
    virtual = experiment.model.virtual_tokens
    for phase in experiment.resolved_phases():
        if phase.sequence_length > model.max_sequence_length:
            own = experiment.phases and experiment.phases[phase.index].sequence_length is not None
            name = f"phases.{phase.index}.sequence_length" if own else "data.sequence_length"
            raise ConfigError(
                f"{name} {phase.sequence_length} is over the model's position table of {model.max_sequence_length}"
                f"{f', without the {virtual} positions of model.peft' if virtual else ''}; use a shorter sequence, or "
                f"set model.max_positions to {phase.sequence_length + virtual} or more"
            )
    experiment.strategy.check(to_tree(experiment))
    check_needs(experiment, objective, model)
    _check_labels(experiment, dataset)
    _check_start_token(experiment, dataset)
    check_one_text(experiment, virtual, "model.peft", "model.peft=lora")
    types = experiment.model.type_vocab
    if experiment.data.packing == "pairs" and types < 2:
        has = f"model.type_vocab is {types}; set it to 2"
        if not types:
            has = "the model has none; use another packing"
        raise ConfigError(f"data.packing pairs marks two segments by token types, and {has}")


def check_one_text(experiment: Experiment, virtual: int, name: str, instead: str) -> None:
    """Refuses positions that a model puts before each row, where that holds several texts.

    Raises:
        ConfigError: saying what puts them there, and what to set instead.
    """
    packing = experiment.data.packing
    if virtual and packing not in ("padded", "pairs"):
        raise ConfigError(
            f"{name} puts {virtual} positions before each text, and data.packing {packing} puts several texts into a "
            f"row; set data.packing=padded, or {instead}"
        )


def check_best(experiment: Experiment, objective: Objective) -> None:
    """Refuses a best score that the evaluations of a task do not give. (Others, and a student's, tell at the first.)

    Raises:
        ConfigError: naming those that they do.
    """
    best, own = experiment.training.best, experiment.objective.task is experiment.objective
    if best is not None and isinstance(objective, Task) and own:
        check_metric(best, ("loss", *objective.score_names))


def check_needs(experiment: Experiment, objective: Objective, model: Model) -> None:
    """Refuses a model that does not offer what the objective needs, or does not fit its batches.

    Raises:
        ConfigError: saying what is missing, or what has parameters that would not be trained.
    """
    config, own = experiment.model, experiment.objective.task
    kinds = {
        name: type(part).__module__.rpartition(".")[2]
        for name, part in (("model", config), ("objective", own))
    }
    missing = objective.needs - model.offers
    if objective.predicts in missing:
        missing = frozenset({objective.predicts})  # the rest may come with it
    if missing:
        offers = sorted(name for name in model.offers if not name.startswith("layer."))
        raise ConfigError(
            f"the objective, {kinds['objective']}, needs {', '.join(sorted(missing))}, and the model, "
            f"{kinds['model']}, offers {', '.join(offers)}; {_fixes(experiment, objective, model, missing)}"
        )
    if untrained := sorted(model.trains.keys() - objective.needs):
        setting = model.trains[untrained[0]]
        raise ConfigError(
            f"the model, {kinds['model']}, has parameters for {untrained[0]}, which the objective, "
            f"{kinds['objective']}, does not train; {f'set {setting}, or ' if setting else ''}choose another objective"
        )
    if absent := sorted(model.reads - objective.columns):
        raise ConfigError(
            f"the model, {kinds['model']}, reads the column {absent[0]}, which the objective, {kinds['objective']}, "
            "does not make; choose another model or objective"
        )


def _fixes(experiment: Experiment, objective: Objective, model: Model, missing: Outputs) -> str:
    """What to do about outputs that a model does not offer."""
    config = experiment.model
    settings = [
        config.settings_for[name] for name in sorted(missing) if name in config.settings_for
    ]
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
    """Rejects a head with other labels than the dataset's."""
    model = experiment.model
    for source in named_sources(dataset).values():
        labels = () if source.manifest.task is None else source.manifest.task.labels
        if model.head in FEWEST_LABELS and labels != model.labels:
            raise ConfigError(
                f"the labels of {source.name} are {', '.join(labels)}, and model.labels is {', '.join(model.labels)}; "
                f"set model.labels='{json.dumps(labels)}', in this order"
            )


def _check_start_token(experiment: Experiment, dataset: AnyDataset) -> None:
    """Rejects a tokenizer without the token that a task's decoder starts with."""
    model, pad = experiment.model, dataset.tokenizer.vocabulary.pad
    if model.head != "language_model" and model.decoder and model.start_token not in (None, pad):
        kind = type(model).__module__.rpartition(".")[2]
        raise ConfigError(
            f"the decoder of {kind} begins with the token of padding, of id {model.start_token}, and in {dataset.name} "
            f"that id is {pad}; build the dataset with T5's tokenizer, or one of algorithm unigram"
        )
