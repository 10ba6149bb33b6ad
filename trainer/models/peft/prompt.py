"""Prompt tuning (Lester et al.

2021, arXiv 2104.08691): embeddings before those of the text, and nothing else.

Of an encoder-decoder they come before what the encoder reads. The text has the positions after
theirs, and a head that reads the first cell of a sequence reads the first of theirs, as in Hugging
Face's `peft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.base import TransformerModel
from trainer.models.peft import Added

NAME = "prompt.weight"
"""Of the parameter."""


@dataclass(frozen=True)
class Config(Added):
    """Prompt tuning: learned embeddings before those of the text.

    Attributes:
        length: how many there are; a sequence is longer by so many cells.
    """

    length: int = 20

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length is {self.length}; use 1 or more, as 20")

    def add_to(self, model: nn.Module) -> None:
        if not isinstance(model, TransformerModel):
            raise ConfigError(
                "model.peft is a prompt, which this kind of model has no place for; use lora"
            )
        tokens = model.get_parameter("embeddings.tokens.weight")
        model.prompt = Prompt(self.length, tokens.shape[1], tokens.device)

    def owns(self, name: str) -> bool:
        return name == NAME

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return 0.02 if name == NAME else None


class Prompt(nn.Module):
    """The embeddings."""

    def __init__(self, length: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Puts them before embeddings of texts: [B, S, D] -> [B, n + S, D]."""
        return torch.cat([self.weight.to(hidden.dtype).expand(len(hidden), -1, -1), hidden], 1)
