"""Initial weights from a trained model: all of them, some of its layers, or all but the last."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from samestep.config import Kinds, differences, kind_name, to_tree
from samestep.config.tree import of_kinds
from samestep.errors import CheckpointError, ConfigError
from trainer.checkpoint.layout import StoredTensors
from trainer.models import Model, ModelConfig, Start, Stored
from trainer.strategies import InitialValues
from trainer.training.start_record import alters_model
from trainer.training.weights.added_tokens import ExtendedRows, extended_rows
from trainer.training.weights.label_order import is_reordered
from trainer.training.weights.loading import Weights
from trainer.training.weights.spare import lent as lent_parts

if TYPE_CHECKING:
    from data_pipeline.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class HasTokenizer(Protocol):
    """A dataset, or a stand-in that has its name and tokenizer."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def stored_values(
    weights: Weights, model: Model, dataset: HasTokenizer, seed: int | None = None
) -> InitialValues:
    """Returns the parameter values of a trained model for `model`.

    Args:
        model: gets the values. Its parameters must keep their shapes while values are read.
        seed: at the start of a run, initializes what the weights do not have, such as a head for
            a new task; see `Model.start_from`. None: the weights must belong to this very model.

    Raises:
        CheckpointError: the weights are of another model.
        ConfigError: the dataset has another tokenizer, a parameter without a value is frozen, or a
            setting makes another model of the weights.
    """
    if is_reordered(weights.config.labels, model.config.labels):
        logger.info("the outputs of the head move to the order of model.labels")
        weights = weights.in_label_order(model.config.labels)
    # `start.sources` names the stored tensor of each parameter. At the start of a run the model
    # decides: it may take its head from another one's, or leave it to be initialized.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = Stored(weights.config, {name: weights.tensors.shape(name) for name in weights.tensors})
    start = Start({name: name for name in shapes})
    if seed is None:
        _check_same_model(weights, model.config)
    else:
        _check_peft(weights, model)
        start = model.start_from(stored)
    sources = {name: source for name, source in start.sources.items() if source is not None}
    tensors = weights.tensors.with_added(start.added)
    lent = lent_parts(weights.spare, model, sources)
    sources |= {name: name for name in lent}
    for name, parameter in model.named_parameters():
        if seed is not None and not parameter.requires_grad and name not in sources:
            raise ConfigError(
                f"{name} is frozen, and {weights.folder} has no values for it; take it out of "
                "frozen"
            )
    tensors = StoredTensors({**tensors.pieces, **StoredTensors.of(lent).pieces})
    extended: dict[str, ExtendedRows] = {}
    if seed is not None:
        extended = _extended_rows(weights, model, dataset, tensors, sources)
    # Every stored tensor must be used or be expendable: one that is not is a sign of other weights.
    wrong = [
        name
        for name, source in sources.items()
        if stored.shapes.get(source) != shapes[name] and name not in {*extended, *lent}
    ]
    used = {*shapes, *sources.values(), *start.added.values()}
    unused = [name for name in stored.shapes if name not in used]
    unknown = [name for name in unused if name not in start.unused]
    if wrong or unknown:
        _check_decoder(weights, model.config)
        raise CheckpointError(
            f"{weights.folder} holds another model than the experiment's: {len(wrong)} parameters "
            f"are missing or of another shape and {len(unknown)} are unknown, first "
            f"{(wrong + unknown)[0]}; {_fix(weights.config, model.config)}"
        )
    if unused:
        logger.info("left out, because %s: %s", start.reason, ", ".join(unused))
    _log_sources(model, sources, lent)
    _check_tokenizer(weights, dataset, may_extend=seed is not None)

    # Called for the partition of each parameter that this process holds: under FSDP, no process
    # reads the whole model.
    def values(name: str, first: int, stop: int) -> Tensor:
        if name in extended:
            return weights.finite(name, extended[name](first, stop))
        if name in sources:
            return weights.finite(name, tensors.elements(sources[name], first, stop).float())
        assert seed is not None, "weights of this very model hold all of its parameters"
        return model.initial_values(name, first, stop, seed)

    return values


def _log_sources(model: Model, sources: Mapping[str, str], lent: Container[str]) -> None:
    """Logs parameters from other sources than their names, so that a mistaken init_from shows."""
    moved = [name for name, source in sources.items() if source != name or name in lent]
    of_head = [name for name in moved if model.role(name).part not in ("layer", "shared")]
    if of_head:
        logger.info("taken for the head: %s", ", ".join(sources[name] for name in of_head))
    if count := len(moved) - len(of_head):
        logger.info("%d parameters of the layers start from tensors of other names", count)
    if new := [name for name, _ in model.named_parameters() if name not in sources]:
        logger.info("initialized at random: %s", ", ".join(new))


def _check_decoder(weights: Weights, config: ModelConfig) -> None:
    """Rejects an encoder where a model needs its decoder too."""
    stored = weights.config
    if config.encoder_decoder and not (stored.encoder_decoder or stored.causal):
        raise CheckpointError(
            f"{weights.folder} is an encoder alone, and a {kind_name(config)} with model.head="
            f"{config.head} needs a decoder. Start from a whole model, as "
            "T5ForConditionalGeneration instead of T5EncoderModel, or set model.head=embedding or "
            "tagging"
        )


def _check_same_model(weights: Weights, config: ModelConfig) -> None:
    """Rejects settings that make another model of trained weights, even of equal shapes."""
    trained = weights.config
    if len(trained.labels) == len(config.labels) == 1:  # a number, whatever a dataset calls it
        trained = trained.with_settings(labels=config.labels)
    before, now = ({"kind": kind_name(each), **to_tree(each)} for each in (trained, config))
    changes = [
        f"model.{name}: {old} -> {new}"
        for name, (old, new) in of_kinds(differences(before, now)).items()
        if alters_model(name)
    ]
    if changes:
        raise ConfigError(
            f"{weights.folder} holds another model than the experiment's ({', '.join(changes)}). "
            "Use its settings, or train with these."
        )


def _fix(stored: ModelConfig, own: ModelConfig) -> str:
    """The settings to change; those with fractions, as dropout, do not decide about shapes."""
    if type(stored) is not type(own):
        differ = [f"model.kind={Kinds('trainer.models.families').kind_of(stored)}"]
    else:
        differ = [
            f"model.{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in vars(stored).items()
            if isinstance(value, int | str) and value != vars(own)[name]
        ]
    settings = ", ".join(differ) or "the model section"
    return f"set {settings} as it was there, or start from other weights"


def _extended_rows(
    weights: Weights,
    model: Model,
    dataset: HasTokenizer,
    tensors: StoredTensors,
    sources: Mapping[str, str],
) -> dict[str, ExtendedRows]:
    """The parameters with rows for tokens that the weights lack; see `added_tokens`.

    Raises:
        ConfigError: such a parameter is frozen.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    before, now = weights.load_tokenizer(), dataset.tokenizer
    size, is_extended = before.vocabulary.size, now.extends(before)
    stored = {name: source for name, source in sources.items() if source in tensors}
    found = extended_rows(tensors, stored, shapes, model.config, size, is_extended)
    for name in found:
        if not parameters[name].requires_grad:
            raise ConfigError(
                f"{name} is frozen, and the rows of the tokens that {weights.folder} lacks would "
                "never be trained. Take it out of frozen, or train without model.peft first."
            )
    if found:
        new = now.vocabulary.size - size if is_extended else 0
        logger.info(
            "%d tokens are new; they start as the mean of the others in %s", new, ", ".join(found)
        )
    return found


def _check_tokenizer(weights: Weights, dataset: HasTokenizer, may_extend: bool) -> None:
    """Rejects a dataset of another tokenizer: its token ids would mean other words.

    Args:
        may_extend: whether the dataset's tokenizer may have further tokens.
    """
    own = weights.load_tokenizer()
    if own.fingerprint == dataset.tokenizer.fingerprint:
        return
    is_extended = dataset.tokenizer.vocabulary.size > own.vocabulary.size
    if dataset.tokenizer.keeps_ids(own) and (may_extend or not is_extended):
        return
    copy, folder = "", str(weights.tokenizer)
    if not isinstance(weights.tokenizer, Path):
        copy, folder = f"copy {weights.tokenizer} to a folder DIR, ", "DIR"
    raise ConfigError(
        f"{weights.folder} was trained with another tokenizer than {dataset.name} was built with, "
        f"so its tokens mean other words; {copy}build a dataset with tokenizer.path={folder} and "
        "set data.path to it"
    )


def _check_peft(weights: Weights, model: Model) -> None:
    """Rejects weights with another parameter-efficient fine-tuning than the model's."""
    before, now = weights.config.peft, model.config.peft
    if before is None or before == now:
        return
    kind = kind_name(before)
    merge = (
        f"samestep export {weights.folder} DIR adds what it learned to the weights of DIR, to "
        "start from; or "
    )
    raise ConfigError(
        f"{weights.folder} holds a model with {kind}, and the experiment's has "
        f"{'none' if now is None else 'other settings of model.peft'}; "
        f"{merge if before.merges else ''}keep its model.peft (leave the section out)"
    )


def with_encoder(weights: Weights, encoder: Weights) -> Weights:
    """Returns a trained model with the parameters of another one everywhere but in its heads.

    With tied embeddings, the output matrix is among the parameters that are replaced.

    Args:
        weights: the model, which keeps its heads.
        encoder: a model of the same architecture, which may have other heads.

    Raises:
        CheckpointError: the parameters outside of the heads do not correspond.
        ConfigError: the models have different tokenizers.
    """
    # Names and shapes suffice: both are models of ours, with the same names for the same parts.
    own, other = (_shapes_outside_heads(each) for each in (weights, encoder))
    # A name is here if only one has it, or if the shapes differ.
    if differ := sorted(dict(own.items() ^ other.items())):
        hint = ""
        if encoder.config.peft is not None:
            hint = ". Its model.peft adds parameters, which samestep export may merge"
        raise CheckpointError(
            f"{encoder.folder} is of another architecture than {weights.folder}: {differ[0]} has "
            f"another shape, or only one of them has it{hint}"
        )
    # Equal shapes say nothing about which id is which word.
    if encoder.load_tokenizer().fingerprint != weights.load_tokenizer().fingerprint:
        raise ConfigError(
            f"{encoder.folder} was trained with another tokenizer than {weights.folder}, so its "
            "tokens mean other words. Use checkpoints with the same tokenizer"
        )
    replaced = {name: encoder.tensors.pieces[name] for name in other}
    return replace(weights, tensors=StoredTensors({**weights.tensors.pieces, **replaced}))


def _shapes_outside_heads(weights: Weights) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = weights.config.build()
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if model.role(name).part != "head"
    }


def choose_layers(weights: Weights, layers: Sequence[int]) -> Weights:
    """Returns a trained model with only some of its layers; of T5's, in both stacks.

    Parameters outside of layers stay as they are.

    Args:
        layers: numbers of the layers, from 0, in their new order: [0, 3, 3] gives a model of three
            layers, with layer 3 twice.

    Raises:
        ConfigError: there are no such layers.
    """
    with torch.device("meta"):
        model = weights.config.build()
    # Only names change: nothing is read before the parameters get their values.
    pieces = {}
    for name in weights.tensors:
        place, own = model.layer_of(name), weights.tensors.pieces[name]
        if place is None:
            pieces[name] = own
            continue
        if wrong := [number for number in layers if not 0 <= number < place.depth]:
            raise ConfigError(
                f"init_layers names layer {wrong[0]}, and {weights.folder} has {place.depth}, "
                f"numbered from 0; use 0 to {place.depth - 1}"
            )
        for number, chosen in enumerate(layers):
            # A layer may be chosen twice, and then gives its values to both.
            if chosen == place.number:
                pieces[place.at(number)] = own
    numbers = ", ".join(map(str, layers))
    logger.info("the layers start from layers %s of %s", numbers, weights.folder)
    return replace(weights, tensors=StoredTensors(pieces))


def reinitialize_layers(
    values: InitialValues, model: Model, layers: int, seed: int
) -> InitialValues:
    """Initializes the last layers of each stack and a task's pooler at random again.

    In pre-training they specialize in its own objective, and small tasks may do better without
    (Zhang et al. 2021, "Revisiting few-sample BERT fine-tuning").

    Args:
        values: of all parameters.
        layers: number of last layers.

    Raises:
        ConfigError: the model has fewer layers, or some of these are frozen.
    """
    if layers > model.config.layers:
        raise ConfigError(
            f"redraw_layers is {layers}, and the model has {model.config.layers} layers; use fewer"
        )
    chosen = model.last_layers(layers)
    for name, parameter in model.named_parameters():
        if name in chosen and not parameter.requires_grad:
            raise ConfigError(
                f"redraw_layers {layers} initializes {name}, which is frozen; set redraw_layers=0"
            )
    logger.info("initialized at random: the last %d layers", layers)

    def new_values(name: str, start: int, stop: int) -> Tensor:
        if name in chosen:
            return model.initial_values(name, start, stop, seed)
        return values(name, start, stop)

    return new_values
