"""Prompt tuning (Lester et al. 2021, arXiv 2104.08691): learned embeddings before a text.

In an encoder-decoder they come before the encoder's input. The text's positions follow theirs, and
a head that pools the first position pools the prompt's first, as in Hugging Face's `peft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.base import TransformerModel
from trainer.models.peft import Peft

NAME = "prompt.weight"


@dataclass(frozen=True)
class Config(Peft):
    """Prompt tuning: learned embeddings before a text.

    Attributes:
        length: number of embeddings, which lengthen each sequence.
    """

    length: int = 20

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length is {self.length}. Use 1 or more, such as 20.")

    def add_to(self, model: nn.Module) -> None:
        if not isinstance(model, TransformerModel):
            raise ConfigError("model.peft prompt does not fit this kind of model. Use lora.")
        tokens = model.get_parameter("embeddings.tokens.weight")
        model.prompt = Prompt(self.length, tokens.shape[1], tokens.device)

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return 0.02 if name == NAME else None


class Prompt(nn.Module):
    """Inserts learned embeddings before a text's."""

    def __init__(self, length: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, n + S, D]."""
        return torch.cat([self.weight.to(hidden.dtype).expand(len(hidden), -1, -1), hidden], 1)
