"""Initial token embeddings from word vectors, as task models had before BERT."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models import Model
from trainer.strategies import InitialValues
from trainer.training.weights.initial import HasTokenizer
from trainer.vectors.folder import WordVectors

logger = logging.getLogger(__name__)


def with_embeddings(
    values: InitialValues, model: Model, vectors: WordVectors, dataset: HasTokenizer
) -> InitialValues:
    """Replaces rows of the token embeddings by vectors of tokens.

    Tokens without a vector (special ones, and those that were too rare) keep their values.

    Args:
        values: of all parameters.
        vectors: of tokens, of the dataset's tokenizer.

    Raises:
        ConfigError: they are of words, of another tokenizer, or of another width than the table.
    """
    setting = f"init_embeddings={vectors.folder}"
    if vectors.tokens is None:
        raise ConfigError(
            f"{setting} holds vectors of words, and the model reads tokens. Train vectors with: "
            "samestep vectors DATASET --units tokens"
        )
    if vectors.description["tokenizer"] != dataset.tokenizer.fingerprint:
        raise ConfigError(
            f"{setting} was trained with another tokenizer than {dataset.name} was built with, so "
            "its tokens mean other words. Train vectors on a dataset of the same tokenizer."
        )
    table = model.token_embeddings
    rows, width = table.shape
    if vectors.vectors.shape[1] != width:
        raise ConfigError(
            f"{setting} has vectors of {vectors.vectors.shape[1]} dimensions, and the model's "
            f"token embeddings have {width}. Train vectors with --dimensions {width}."
        )
    own = next(name for name, parameter in model.named_parameters() if parameter is table)
    number = torch.full((rows,), -1)
    number[vectors.tokens] = torch.arange(len(vectors.words))
    logger.info(
        "%d of %d tokens start with vectors of %s", len(vectors.words), rows, vectors.folder
    )

    def new_values(name: str, first: int, stop: int) -> Tensor:
        found = values(name, first, stop)
        if name != own:
            return found
        # Element i of the flattened table is in row i // width, column i % width.
        element = torch.arange(first, stop)
        row = number[element // width]
        return torch.where(row >= 0, vectors.vectors[row, element % width], found)

    return new_values
