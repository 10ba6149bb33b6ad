"""The contract between a model that generates text and the search."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from trainer.models import ModelConfig
from trainer.models.cache import Cache
from trainer.models.inputs import Inputs


@runtime_checkable
class Generates(Protocol):
    """A model that generates text: an encoder-decoder, or a causal model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def max_sequence_length(self) -> int: ...

    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        """Processes the prompt.

        Args:
            inputs: tokens and segments, padded at the left for a causal model; for an
                encoder-decoder also the first target tokens.
            capacity: of the cache, in positions.

        Returns:
            The logits [B, V] of the next tokens, and the cache for `step`.
        """
        ...

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Processes one token per row: int [B] -> the logits [B, V] of the next ones."""
        ...
