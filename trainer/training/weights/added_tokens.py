"""Initial values for the tokens that a tokenizer has in addition to the one of a trained model.

A new token starts with the mean of the old ones, in each table with a row per token and in the
bias of the head. Its logit is then the mean of the old logits, at every position. As exp is convex,
k new tokens beside V old ones have a probability of at most k / (V + k) together, so the loss on
text without them rises by at most log((V + k) / V). Random rows have logits near 0 instead, which a
trained model gives to no unlikely token: they would start with most of the probability (Hewitt
2021, "Initializing new word embeddings for pretrained language models").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from trainer.checkpoint.layout import StoredTensors
from trainer.models import ModelConfig

_BLOCK = 2**22  # elements read at a time


def growing_dimensions(config: ModelConfig, **settings: object) -> dict[str, list[int]]:
    """Finds the parameters that grow with a setting, such as the size of the vocabulary.

    Args:
        settings: one more than `config` has, as `vocab_size=config.vocab_size + 1`.

    Returns:
        The dimensions that grow, by the name of the parameter.
    """
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in config.build().named_parameters()}
        larger = config.with_settings(**settings).build()
    grown = {}
    for name, parameter in larger.named_parameters():
        pairs = enumerate(zip(shapes[name], parameter.shape, strict=True))
        if dimensions := [dimension for dimension, (old, new) in pairs if old != new]:
            grown[name] = dimensions
    return grown


def with_row_per_token(config: ModelConfig) -> frozenset[str]:
    """The parameters of a model with one row per token, or one element: tables and biases."""
    # No list of names: a parameter that grows with the vocabulary has a row per token.
    return frozenset(growing_dimensions(config, vocab_size=config.vocab_size + 1))


class ExtendedRows:
    """Values of a parameter with a row per token, for a larger vocabulary than the stored one's.

    With 4 old tokens, a stored table of 6 rows and a new one of 8, rows 0 to 3 are copied and rows
    4 to 7 are the mean of these: stored rows 4 and 5 were padding and belong to no token.

    Args:
        tensors: where the parameter is stored.
        source: its name there.
        tokens: number of stored rows to copy.
        used: number of these that belong to a token, of which the mean is taken.
        width: elements of a row; 1 for a bias.
    """

    def __init__(
        self, tensors: StoredTensors, source: str, tokens: int, used: int, width: int
    ) -> None:
        self._tensors, self._source = tensors, source
        self._tokens, self._used, self._width = tokens, used, width

    @cached_property
    def _mean(self) -> Tensor:
        """fp32 [width]; summed up in fp64 in one order, so all processes have the same."""
        total = torch.zeros(self._width, dtype=torch.float64)
        rows = max(1, _BLOCK // self._width)
        for first in range(0, self._used, rows):
            last = min(first + rows, self._used)
            block = self._tensors.elements(self._source, first * self._width, last * self._width)
            total += block.double().view(-1, self._width).sum(0)
        return (total / self._used).float()

    def __call__(self, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of the flattened parameter: fp32 [stop - first]."""
        end = self._tokens * self._width
        parts = []
        if first < end:
            parts.append(self._tensors.elements(self._source, first, min(stop, end)).float())
        if stop > end:
            # Element i is in column i % width.
            columns = torch.arange(max(first, end), stop) % self._width
            parts.append(self._mean[columns])
        return torch.cat(parts) if parts else torch.empty(0)


def extended_rows(
    tensors: StoredTensors,
    sources: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    stored_tokens: int,
    extended: bool,
) -> dict[str, ExtendedRows]:
    """The parameters that need rows which the stored weights lack, or had as padding.

    Args:
        tensors: the stored weights.
        sources: the stored tensor for each parameter.
        shapes: of the parameters.
        config: of the new model.
        stored_tokens: size of the stored model's tokenizer.
        extended: whether the new model's tokenizer has further tokens.
    """
    found = {}
    for name in sorted(with_row_per_token(config) & sources.keys()):
        rows, *rest = shapes[name]
        stored_rows, *stored_rest = tensors.shape(sources[name])
        if rest != stored_rest or rows < stored_rows or (rows == stored_rows and not extended):
            continue
        used = min(stored_tokens, stored_rows)
        kept = used if extended else stored_rows
        found[name] = ExtendedRows(tensors, sources[name], kept, used, math.prod(rest))
    return found
