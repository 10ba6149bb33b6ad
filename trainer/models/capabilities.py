"""Optional interfaces of a model's modules, for strategies and the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class UsesKernel(Protocol):
    """An attention module whose kernel a strategy can replace.

    Attributes:
        kernel: called like `scaled_dot_product_attention`.
        dropout: dropout rate of attention probabilities; with dropout, `kernel` is not called.
    """

    kernel: Callable[..., Tensor]
    dropout: float


@runtime_checkable
class Recomputes(Protocol):
    """A module that supports activation checkpointing."""

    checkpointing: bool


@runtime_checkable
class FeedsResidual(Protocol):
    """A module whose output enters the residual stream or a projection: embeddings, norms.

    Attributes:
        stream_dtype: the dtype of its output; None: as it is computed.
    """

    stream_dtype: torch.dtype | None


@runtime_checkable
class ReadsSpellings(Protocol):
    """A module that computes with the characters of tokens."""

    def read_spellings(self, spellings: Sequence[str]) -> None:
        """Takes the spelling of each token, before the first forward pass."""


def give_spellings(model: nn.Module, load: Callable[[], Sequence[str]]) -> None:
    """Gives the spelling of each token, from `load`, to the modules that read it."""
    for module in model.modules():
        if isinstance(module, ReadsSpellings):
            module.read_spellings(load())
