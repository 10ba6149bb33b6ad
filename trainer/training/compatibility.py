"""Whether the parts of a run fit each other: dataset, objective, model, and weights to start from."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

from torch import Tensor

from data_pipeline.reading.mixed_dataset import AnyDataset, named_sources
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.checkpoint.layout import StoredTensors
from trainer.config import to_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.models.config import FEWEST_LABELS
from trainer.objectives import Objective, task_of
from trainer.optim.groups import LAYER, layers_from_last
from trainer.strategies import InitialValues
from trainer.training.best import check_metric
from trainer.training.experiment import Experiment
from trainer.training.weights import Weights

logger = logging.getLogger(__name__)

_ARCHITECTURES = {  # the first of these properties that a model has, else it is an encoder
    "encoder_decoder": ("an encoder with a decoder", "encoder_decoder"),
    "prefix_lm": ("a prefix language model", "prefix_lm"),
    "causal": ("a left-to-right language model", "language_model"),
}
_ENCODER = ("an encoder", "encoder")
_OF_DECODER = ("decoder.", "decoder_norm.", "decoder_bias.")  # what the names of its parameters begin with

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Of parameters, by name."""


def check_fit(experiment: Experiment, dataset: AnyDataset, objective: Objective, model: Any) -> None:
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
    virtual = getattr(experiment.model, "virtual_tokens", 0)
    for phase in experiment.resolved_phases():
        if phase.sequence_length > model.max_sequence_length:
            own = experiment.phases and experiment.phases[phase.index].sequence_length is not None
            name = f"phases.{phase.index}.sequence_length" if own else "data.sequence_length"
            raise ConfigError(
                f"{name} {phase.sequence_length} is over the model's position table of {model.max_sequence_length}"
                f"{f', without the {virtual} positions of model.peft' if virtual else ''}; use a shorter sequence, or "
                f"set model.max_positions to {phase.sequence_length + virtual} or more"
            )
    if hasattr(experiment.strategy, "check"):
        experiment.strategy.check(to_tree(experiment))
    _check_head(experiment, dataset, objective)
    if objective.model_settings.get("head", "language_model") == "language_model":
        _check_architecture(experiment, objective)
    else:
        _check_cells(experiment, dataset, objective)
    has, needed = getattr(experiment.model, "nsp", False), objective.model_settings.get("nsp", False)
    if has != needed:
        raise ConfigError(
            f"model.nsp is {str(has).lower()}, and this objective is for models with nsp {str(needed).lower()}; set "
            f"model.nsp={str(needed).lower()}, or choose another objective"
        )
    check_one_text(experiment, virtual, "model.peft", "model.peft=lora")
    types = getattr(experiment.model, "type_vocab", None)
    if experiment.data.packing == "pairs" and (types is None or types < 2):
        has = (
            "the model has none; use another packing" if types is None else f"model.type_vocab is {types}; set it to 2"
        )
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
    best, names = experiment.training.best, getattr(objective, "score_names", None)
    if best is not None and names is not None and task_of(experiment.objective) is experiment.objective:
        check_metric(best, ("loss", *names))


def _check_architecture(experiment: Experiment, objective: Objective) -> None:
    """Refuses an encoder where a decoder is needed, and the like."""
    model, own = experiment.model, task_of(experiment.objective)
    (has, layout), (needed, architecture) = (
        _architecture(lambda name: getattr(model, name, False)),
        _architecture(lambda name: objective.model_settings.get(name, False)),
    )
    if has == needed:
        return
    fixes = []
    settings = {field.name for field in fields(model)}
    if "architecture" in settings and architecture != "encoder":
        fixes.append(f"model.architecture={architecture}")
    elif "causal" in settings and architecture in ("encoder", "language_model"):
        fixes.append(f"model.causal={str(not model.causal).lower()}")
    if layout in get_args(get_type_hints(type(own)).get("layout")):
        fixes.append(f"objective.layout={layout}")
    kinds = [type(part).__module__.rpartition(".")[2] for part in (model, own)]
    fix = f"set {' or '.join(fixes)}, or " if fixes else ""
    raise ConfigError(
        f"the model, {kinds[0]}, is {has}, and the objective, {kinds[1]}, is for {needed}; {fix}choose another model "
        "or objective"
    )


def _check_head(experiment: Experiment, dataset: AnyDataset, objective: Objective) -> None:
    """Refuses a model whose head is another one than the objective's, or not for the dataset's labels."""
    model, needed = experiment.model, objective.model_settings.get("head", "language_model")
    has = getattr(model, "head", "language_model")
    if has != needed:
        raise ConfigError(
            f"model.head is {has}, and this objective is for models with head {needed}; set model.head={needed}, or "
            "with init_from leave model.kind out, which gives the model of the weights that head"
        )
    for source in named_sources(dataset).values():
        labels = () if source.manifest.task is None else source.manifest.task.labels
        if needed in FEWEST_LABELS and labels != model.labels:
            raise ConfigError(
                f"the labels of {source.name} are {', '.join(labels)}, and model.labels is {', '.join(model.labels)}; "
                f"set model.labels='{json.dumps(labels)}', in this order"
            )


def _check_cells(experiment: Experiment, dataset: AnyDataset, objective: Objective) -> None:
    """Refuses a model to which the cells that a task's objective reads say something else."""
    model, settings = experiment.model, objective.model_settings
    kind = type(model).__module__.rpartition(".")[2]
    if settings.get("causal") and not getattr(model, "causal", False):
        raise ConfigError(
            f"the objective scores the token after each, too, and the model, {kind}, does not; set "
            "objective.lm_weight=0, or choose a left-to-right model, as gpt2"
        )
    decodes = getattr(model, "decoder", False)
    if settings.get("decoder", decodes) != decodes:
        reads, instead = ("first", "last") if decodes else ("last", "first")
        why = "a decoder, which has seen nothing there" if decodes else "an encoder, which is to read [CLS]"
        raise ConfigError(
            f"the objective reads the {reads} cell of a sequence, and the model, {kind}, has {why}; set "
            f"objective.reads={instead}, or choose another model"
        )
    start, pad = getattr(model, "start_token", None), dataset.tokenizer.vocabulary.pad
    if decodes and start not in (None, pad):
        raise ConfigError(
            f"the decoder of {kind} begins with the token of padding, of id {start}, and in {dataset.name} that id is "
            f"{pad}; build the dataset with T5's tokenizer, or one of algorithm unigram"
        )


def _architecture(has: Callable[[str], object]) -> tuple[str, str]:
    """What a model is, in words, and as T5's `architecture` and the objectives' `layout` call it."""
    return next((names for each, names in _ARCHITECTURES.items() if has(each)), _ENCODER)


def stored_values(weights: Weights, model: Any, dataset: AnyDataset, seed: int | None = None) -> InitialValues:
    """The parameters of a trained model, refused unless they fit this model and the dataset's tokens.

    Args:
        weights: of the trained model.
        model: whose parameters are to get the values; its parameters have shapes as long as values are asked for.
        dataset: that of the run.
        seed: for the start of a run: draws a head for a task or the next sentence that the weights have not, or for
            other labels, and what `peft` adds. None: the weights are to be those of this very model.

    Raises:
        CheckpointError: they are of another model. A language model's head is never drawn.
        ConfigError: the dataset has another tokenizer, or what is to be drawn is frozen.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: weights.tensors.shape(name) for name in weights.tensors}
    head, _ = _task(getattr(model, "config", None))
    places: dict[str, str | None] = dict(zip(shapes, shapes, strict=True))
    if seed is not None:
        _check_peft(weights, model)
        places |= _new_head(weights, model, shapes, stored) | _added(model, shapes, stored)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if absent := [name for name in frozen if places[name] != name]:
            raise ConfigError(
                f"{absent[0]} is frozen, and {weights.folder} has no values for it; take it out of frozen"
            )
    wrong = [name for name, place in places.items() if place is not None and stored.get(place) != shapes[name]]
    unused = [name for name in stored if name not in shapes and name not in places.values()]
    unneeded: tuple[str, ...] = ("nsp_head.",) if head == "language_model" or seed is None else ("nsp_head.", "head.")
    if "head." in unneeded and not any(name.startswith(_OF_DECODER) for name in shapes):
        unneeded += _OF_DECODER  # which T5's taggers have not
    extra = [name for name in unused if not name.startswith(unneeded)]
    if wrong or extra:
        raise CheckpointError(
            f"{weights.folder} holds another model than the experiment's: {len(wrong)} parameters are missing or of "
            f"another shape and {len(extra)} are unknown, first {(wrong + extra)[0]}; make the model section match it"
        )
    if unused:
        because = "model.nsp is false" if head == "language_model" else f"model.head is {head}"
        logger.info("left out, because %s: %s", because, ", ".join(unused))
    if moved := [place for name, place in places.items() if place not in (name, None)]:
        logger.info("taken for the head: %s", ", ".join(map(str, moved)))
    if drawn := [name for name, place in places.items() if place is None]:
        logger.info("drawn anew: %s", ", ".join(drawn))
    with weights.tokenizer_files() as files:
        tokenizer = Tokenizer.load(files)
    if tokenizer.fingerprint != dataset.tokenizer.fingerprint:
        here = isinstance(weights.tokenizer, Path)
        copied, folder = ("", weights.tokenizer) if here else (f"copy {weights.tokenizer} to a folder DIR, ", "DIR")
        raise ConfigError(
            f"{weights.folder} was trained with another tokenizer than {dataset.name} was built with, so its tokens "
            f"mean other words; {copied}build a dataset with tokenizer.path={folder} and set data.path to it"
        )

    def values(name: str, start: int, stop: int) -> Tensor:
        if (place := places[name]) is not None:
            return weights.tensors.elements(place, start, stop).float()
        own: Tensor = model.initial_values(name, start, stop, seed)
        return own

    return values


def choose_layers(weights: Weights, layers: Sequence[int]) -> Weights:
    """A trained model with some of its layers alone, of T5's in both stacks; what is in no layer stays as it is.

    Args:
        weights: of the trained model.
        layers: which of its layers come first, second, and so on, counted from 0; one may come twice.

    Raises:
        ConfigError: there are no such layers.
    """
    found = {name: match for name in weights.tensors if (match := LAYER.match(name))}
    for stack in dict.fromkeys(match[1] for match in found.values()):
        count = 1 + max(int(match[2]) for match in found.values() if match[1] == stack)
        if wrong := [number for number in layers if not 0 <= number < count]:
            raise ConfigError(
                f"init_layers names layer {wrong[0]}, and {weights.folder} has {count}, numbered from 0; use 0 to "
                f"{count - 1}"
            )
    pieces = {name: of_it for name, of_it in weights.tensors.pieces.items() if name not in found}
    for name, match in found.items():
        numbers = [number for number, layer in enumerate(layers) if layer == int(match[2])]
        rest = name[match.end() :]
        pieces |= {f"{match[1]}.{number}.{rest}": weights.tensors.pieces[name] for number in numbers}
    logger.info("the layers start from layers %s of %s", ", ".join(map(str, layers)), weights.folder)
    return replace(weights, tensors=StoredTensors(pieces))


def _check_peft(weights: Weights, model: Any) -> None:
    """Refuses weights with another way of parameter-efficient fine-tuning than the model's."""
    before, now = (getattr(config, "peft", None) for config in (weights.config, getattr(model, "config", None)))
    if before is None or before == now:
        return
    kind = type(before).__module__.rpartition(".")[2]
    merged = f"samestep export {weights.folder} DIR adds what it learned to the weights of DIR, to start from; or "
    raise ConfigError(
        f"{weights.folder} holds a model with {kind}, and the experiment's has "
        f"{'none' if now is None else 'other settings of model.peft'}; {merged if kind == 'lora' else ''}keep its "
        "model.peft (leave the section out)"
    )


def _added(model: Any, shapes: Shapes, stored: Shapes) -> dict[str, str | None]:
    """The parameters that `peft` has added and the weights have not: they are drawn."""
    peft = getattr(getattr(model, "config", None), "peft", None)
    if peft is None:
        return {}
    return {
        name: None for name, shape in shapes.items() if name not in stored and peft.initial_std(name, shape) is not None
    }


def redraw_layers(values: InitialValues, model: Any, layers: int, seed: int) -> InitialValues:
    """The same values, but for the last layers of each stack and a task's pooler, which are drawn.

    What pre-training made of these is about its own objective, and small tasks may do better without it (Zhang et al.
    2021, "Revisiting few-sample BERT fine-tuning").

    Raises:
        ConfigError: the model has fewer layers, or some of these are frozen.
    """
    if layers > model.config.layers:
        raise ConfigError(f"redraw_layers is {layers}, and the model has {model.config.layers} layers; use fewer")
    names = [name for name, _ in model.named_parameters()]
    drawn = {name for name, number in layers_from_last(names).items() if number <= layers}
    drawn |= {name for name in names if name.startswith("head.pooler.")}
    if frozen := [
        name for name, parameter in model.named_parameters() if name in drawn and not parameter.requires_grad
    ]:
        raise ConfigError(f"redraw_layers {layers} draws {frozen[0]}, which is frozen; set redraw_layers=0")
    logger.info("drawn anew: the last %d layers", layers)
    return lambda name, start, stop: (
        model.initial_values(name, start, stop, seed) if name in drawn else values(name, start, stop)
    )


def _new_head(weights: Weights, model: Any, shapes: Shapes, stored: Shapes) -> dict[str, str | None]:
    """The parameters of a head that are not those of the weights: for another task or other labels, or for the next
    sentence.

    Returns:
        The name of what each starts from in the weights; None where it is drawn.
    """
    (before, before_labels), (head, labels) = _task(weights.config), _task(getattr(model, "config", None))
    if head == "language_model":
        return {name: None for name in shapes if name.startswith("nsp_head.") and name not in stored}
    if (head, labels) == (before, before_labels):
        return {}
    new = [name for name in shapes if name.startswith("head." if head != before else "head.classifier.")]
    # BERT's fine-tuning goes on with the pooler of next-sentence prediction (Devlin et al. 2019, section 3.2).
    poolers = {name: f"nsp_{name}" for name in new if name.startswith("head.pooler.")}
    return {name: place if stored.get(place := poolers.get(name, "")) == shapes[name] else None for name in new}


def _task(config: Any) -> tuple[str, tuple[str, ...]]:
    """What a model's head predicts, and the names of its classes."""
    return getattr(config, "head", "language_model"), getattr(config, "labels", ())
