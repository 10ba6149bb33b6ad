"""Whether the parts of a run fit each other: dataset, objective, model, and weights to start from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from data_pipeline.mixed import AnyDataset
from data_pipeline.tokenization import Tokenizer
from trainer.config import to_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.experiment import Experiment
from trainer.objectives import Objective
from trainer.strategies import InitialValues
from trainer.weights import Weights

logger = logging.getLogger(__name__)

_ARCHITECTURES = {  # the first of these properties that a model has, else it is an encoder
    "encoder_decoder": ("an encoder with a decoder", "encoder_decoder"),
    "prefix_lm": ("a prefix language model", "prefix_lm"),
    "causal": ("a left-to-right language model", "language_model"),
}
_ENCODER = ("an encoder", "encoder")


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
    for phase in experiment.resolved_phases():
        if phase.sequence_length > model.max_sequence_length:
            own = experiment.phases and experiment.phases[phase.index].sequence_length is not None
            name = f"phases.{phase.index}.sequence_length" if own else "data.sequence_length"
            raise ConfigError(
                f"{name} {phase.sequence_length} is over the model's position table of {model.max_sequence_length}; "
                f"use a shorter sequence, or set model.max_positions to {phase.sequence_length} or more"
            )
    if hasattr(experiment.strategy, "check"):
        experiment.strategy.check(to_tree(experiment))
    _check_architecture(experiment, objective)
    has, needed = getattr(experiment.model, "nsp", False), objective.model_settings.get("nsp", False)
    if has != needed:
        raise ConfigError(
            f"model.nsp is {str(has).lower()}, and this objective is for models with nsp {str(needed).lower()}; set "
            f"model.nsp={str(needed).lower()}, or choose another objective"
        )
    types = getattr(experiment.model, "type_vocab", None)
    if experiment.data.packing == "pairs" and (types is None or types < 2):
        has = (
            "the model has none; use another packing" if types is None else f"model.type_vocab is {types}; set it to 2"
        )
        raise ConfigError(f"data.packing pairs marks two segments by token types, and {has}")


def _check_architecture(experiment: Experiment, objective: Objective) -> None:
    """Refuses an encoder where a decoder is needed, and the like."""
    model, own = experiment.model, experiment.objective
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


def _architecture(has: Callable[[str], bool]) -> tuple[str, str]:
    """What a model is, in words, and as T5's `architecture` and the objectives' `layout` call it."""
    return next((names for each, names in _ARCHITECTURES.items() if has(each)), _ENCODER)


def stored_values(weights: Weights, model: Any, dataset: AnyDataset) -> InitialValues:
    """The parameters of a trained model, refused unless they fit this model and the dataset's tokens."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: weights.tensors.shape(name) for name in weights.tensors}
    wrong = [name for name, shape in shapes.items() if stored.get(name) != shape]
    extra = [name for name in stored if name not in shapes]
    heads = [name for name in extra if name.startswith("nsp_head.")]
    if heads and len(heads) == len(extra):
        logger.info("left out, because model.nsp is false: %s", ", ".join(heads))
        extra = []
    if wrong or extra:
        raise CheckpointError(
            f"{weights.folder} holds another model than the experiment's: {len(wrong)} parameters are missing or of "
            f"another shape and {len(extra)} are unknown, first {(wrong + extra)[0]}; make the model section match it"
        )
    with weights.tokenizer_files() as files:
        tokenizer = Tokenizer.load(files)
    if tokenizer.fingerprint != dataset.tokenizer.fingerprint:
        here = isinstance(weights.tokenizer, Path)
        copied, folder = ("", weights.tokenizer) if here else (f"copy {weights.tokenizer} to a folder DIR, ", "DIR")
        raise ConfigError(
            f"{weights.folder} was trained with another tokenizer than {dataset.name} was built with, so its tokens "
            f"mean other words; {copied}build a dataset with tokenizer.path={folder} and set data.path to it"
        )
    return lambda name, start, stop: weights.tensors.elements(name, start, stop).float()
