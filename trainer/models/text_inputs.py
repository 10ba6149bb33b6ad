"""Texts as inputs of a model: special tokens, batches of similar length, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from samestep.examples import Vocabulary
from trainer.models import ModelConfig
from trainer.models.inputs import Inputs

Int64: TypeAlias = npt.NDArray[np.int64]
TokenIds: TypeAlias = npt.NDArray[Any]
"""[T], of any type of integers."""

BATCH_TOKENS = 8192
"""Positions of a batch, padding included, unless a user chooses others."""


def batches(lengths: Int64, batch_tokens: int) -> Iterator[Int64]:
    """Groups sequences of similar length into batches.

    The longest come first, so that running out of memory shows at once.

    Args:
        lengths: int64 [N].
        batch_tokens: positions of a batch, padding included. A longer sequence is a batch by
            itself.

    Yields:
        The indices of a batch's sequences.
    """
    # Example: lengths 3 9 4 with 10 positions a batch give [1], which is 9 wide, and [2, 0], of
    # 2 x 4 positions.
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        count = max(1, batch_tokens // int(lengths[order[first]]))
        yield order[first : first + count]
        first += count


def padded_columns(texts: Sequence[TokenIds], width: int = 0) -> dict[str, Tensor]:
    """Texts as rows of a batch, [B, S] with S of at least `width`; the shorter end with padding."""
    # torch cannot pad the uint16 of shards.
    tokens = pad_sequence([torch.from_numpy(text.astype(np.int64)) for text in texts], True)
    tokens = F.pad(tokens, (0, max(0, width - tokens.shape[1])))
    lengths = torch.tensor([len(text) for text in texts])
    positions = torch.arange(tokens.shape[1])
    return {
        "tokens": tokens,
        "segments": (positions < lengths[:, None]).int(),
        "positions": positions.expand_as(tokens),
    }


def padded_inputs(texts: Sequence[TokenIds], device: torch.device) -> Inputs:
    """Texts as rows of a batch on a device; the shorter ones end with padding."""
    return Inputs.of({name: each.to(device) for name, each in padded_columns(texts).items()})


def special_tokens(config: ModelConfig, vocabulary: Vocabulary) -> list[list[int]]:
    """The special tokens before and after each text in training, where the tokenizer has them."""
    cls, end = vocabulary.cls, vocabulary.end
    before, after = cls, vocabulary.sep  # an encoder's: [CLS] text [SEP]
    if config.reads_sources:
        before, after = None, end
    elif config.causal:
        before, after = end if cls is None else cls, None
    return [[] if token is None else [token] for token in (before, after)]


def prepare(
    tokens: TokenIds, before: Sequence[int], after: Sequence[int], longest: int
) -> TokenIds:
    """Adds special tokens to a text, which is truncated to `longest` tokens without them."""
    first, last = (np.array(side, tokens.dtype) for side in (before, after))
    return np.concatenate((first, tokens[:longest], last))
