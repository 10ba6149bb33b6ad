"""Initial weights of a run: values from a trained model, chosen layers, reinitialized layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline.reading.mixed_dataset import AnyDataset
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.checkpoint.layout import StoredTensors
from trainer.errors import CheckpointError, ConfigError
from trainer.models import Model, Start, Stored
from trainer.strategies import InitialValues
from trainer.training.weights import Weights

logger = logging.getLogger(__name__)


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


def reinitialize_layers(
    values: InitialValues, model: Model, layers: int, seed: int
) -> InitialValues:
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
