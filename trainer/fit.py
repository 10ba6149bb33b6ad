"""Whether the parts of a run fit each other: dataset, objective, model, and weights to start from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from data_pipeline.mixed import AnyDataset
from data_pipeline.tokenization import Tokenizer
from trainer.errors import CheckpointError, ConfigError
from trainer.experiment import Experiment
from trainer.objectives import Objective
from trainer.strategies import InitialValues
from trainer.weights import Weights

logger = logging.getLogger(__name__)

_MODEL_SETTINGS = ("causal", "nsp")


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
    for name in _MODEL_SETTINGS:
        has, needed = getattr(experiment.model, name, False), objective.model_settings.get(name, False)
        if has != needed:
            raise ConfigError(
                f"model.{name} is {str(has).lower()}, and this objective is for models with {name} "
                f"{str(needed).lower()}; set model.{name}={str(needed).lower()}, or choose another objective"
            )
    if experiment.data.packing == "pairs" and experiment.model.type_vocab < 2:
        raise ConfigError(
            f"data.packing pairs marks two segments by token types, and model.type_vocab is "
            f"{experiment.model.type_vocab}; set it to 2"
        )


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
