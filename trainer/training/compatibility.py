"""Whether the parts of a run fit each other: dataset, objective, model, and weights to start from."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.reading.mixed_dataset import AnyDataset, named_sources
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.checkpoint.layout import StoredTensors
from trainer.config import to_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.models import Model, Outputs, Start, Stored
from trainer.models.config import FEWEST_LABELS
from trainer.objectives import Objective, Task
from trainer.strategies import InitialValues
from trainer.training.best import check_metric
from trainer.training.experiment import Experiment
from trainer.training.weights import Weights

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


def stored_values(
    weights: Weights, model: Model, dataset: AnyDataset, seed: int | None = None
) -> InitialValues:
    """The parameters of a trained model, rejected unless they fit this model and the dataset.

    Args:
        weights: of the trained model.
        model: gets the values; its parameters have shapes as long as values are asked for.
        dataset: of the run.
        seed: at the start of a run: initializes what the weights do not have, as a head for a new
            task; see `Model.start_from`. None: the weights must be those of this very model.

    Raises:
        CheckpointError: they are of another model.
        ConfigError: the dataset has another tokenizer, or what is to be initialized is frozen.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = Stored(weights.config, {name: weights.tensors.shape(name) for name in weights.tensors})
    start = Start({name: name for name in shapes})
    if seed is not None:
        _check_peft(weights, model)
        start = model.start_from(stored)
        frozen = [
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        ]
        if absent := [name for name in frozen if start.sources.get(name) != name]:
            raise ConfigError(
                f"{absent[0]} is frozen, and {weights.folder} has no values for it; take it out of frozen"
            )
    taken = {name: source for name, source in start.sources.items() if source is not None}
    wrong = [name for name, source in taken.items() if stored.shapes.get(source) != shapes[name]]
    used = {*shapes, *taken.values()}
    unused = [name for name in stored.shapes if name not in used]
    extra = [name for name in unused if name not in start.unused]
    if wrong or extra:
        raise CheckpointError(
            f"{weights.folder} holds another model than the experiment's: {len(wrong)} parameters are missing or of "
            f"another shape and {len(extra)} are unknown, first {(wrong + extra)[0]}; make the model section match it"
        )
    if unused:
        logger.info("left out, because %s: %s", start.reason, ", ".join(unused))
    if moved := [source for name, source in taken.items() if source != name]:
        logger.info("taken for the head: %s", ", ".join(moved))
    if drawn := [name for name in shapes if name not in taken]:
        logger.info("drawn anew: %s", ", ".join(drawn))
    with weights.tokenizer_files() as files:
        tokenizer = Tokenizer.load(files)
    if tokenizer.fingerprint != dataset.tokenizer.fingerprint:
        here = isinstance(weights.tokenizer, Path)
        copied, folder = (
            ("", weights.tokenizer)
            if here
            else (f"copy {weights.tokenizer} to a folder DIR, ", "DIR")
        )
        raise ConfigError(
            f"{weights.folder} was trained with another tokenizer than {dataset.name} was built with, so its tokens "
            f"mean other words; {copied}build a dataset with tokenizer.path={folder} and set data.path to it"
        )

    def values(name: str, first: int, stop: int) -> Tensor:
        if name in taken:
            return weights.tensors.elements(taken[name], first, stop).float()
        assert seed is not None, "weights of this very model hold all of its parameters"
        return model.initial_values(name, first, stop, seed)

    return values


def choose_layers(weights: Weights, layers: Sequence[int]) -> Weights:
    """A trained model with some of its layers alone, of T5's in both stacks; what is in no layer stays as it is.

    Args:
        weights: of the trained model.
        layers: which of its layers come first, second, and so on, counted from 0; one may come twice.

    Raises:
        ConfigError: there are no such layers.
    """
    with torch.device("meta"):
        model = weights.config.build()
    places = {name: model.layer_of(name) for name in weights.tensors}
    pieces = {name: weights.tensors.pieces[name] for name, place in places.items() if place is None}
    for name, place in places.items():
        if place is None:
            continue
        if wrong := [number for number in layers if not 0 <= number < place.depth]:
            raise ConfigError(
                f"init_layers names layer {wrong[0]}, and {weights.folder} has {place.depth}, numbered from 0; use 0 "
                f"to {place.depth - 1}"
            )
        for number, chosen in enumerate(layers):
            if chosen == place.number:
                pieces[place.at(number)] = weights.tensors.pieces[name]
    logger.info(
        "the layers start from layers %s of %s", ", ".join(map(str, layers)), weights.folder
    )
    return replace(weights, tensors=StoredTensors(pieces))


def _check_peft(weights: Weights, model: Model) -> None:
    """Rejects weights with another way of parameter-efficient fine-tuning than the model's."""
    before, now = weights.config.peft, model.config.peft
    if before is None or before == now:
        return
    kind = type(before).__module__.rpartition(".")[2]
    merged = f"samestep export {weights.folder} DIR adds what it learned to the weights of DIR, to start from; or "
    raise ConfigError(
        f"{weights.folder} holds a model with {kind}, and the experiment's has "
        f"{'none' if now is None else 'other settings of model.peft'}; {merged if before.merges else ''}keep its "
        "model.peft (leave the section out)"
    )


def redraw_layers(values: InitialValues, model: Model, layers: int, seed: int) -> InitialValues:
    """The same values, but for the last layers of each stack and a task's pooler, which are drawn.

    What pre-training made of these is about its own objective, and small tasks may do better without it (Zhang et al.
    2021, "Revisiting few-sample BERT fine-tuning").

    Raises:
        ConfigError: the model has fewer layers, or some of these are frozen.
    """
    if layers > model.config.layers:
        raise ConfigError(
            f"redraw_layers is {layers}, and the model has {model.config.layers} layers; use fewer"
        )
    drawn = model.last_layers(layers)
    if frozen := [
        name
        for name, parameter in model.named_parameters()
        if name in drawn and not parameter.requires_grad
    ]:
        raise ConfigError(
            f"redraw_layers {layers} draws {frozen[0]}, which is frozen; set redraw_layers=0"
        )
    logger.info("drawn anew: the last %d layers", layers)
    return lambda name, start, stop: (
        model.initial_values(name, start, stop, seed)
        if name in drawn
        else values(name, start, stop)
    )
