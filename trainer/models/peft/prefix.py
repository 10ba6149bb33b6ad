"""Prefix tuning (Li & Liang 2021, arXiv 2101.00190).

Keys and values before those of the text, in every layer.

They are parameters themselves, as in P-tuning v2 (Liu et al. 2021), where the paper has a network
make them. The text has the positions after theirs, as in Hugging Face's `peft`; T5's learned biases
of distances are 0 for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.attention import SelfAttention
from trainer.models.peft import Added

_ADDED = re.compile(r"(.*)\.prefix\.(keys|values)")
_STD = 0.02


@dataclass(frozen=True)
class Config(Added):
    """Prefix tuning: keys and values that every cell attends to besides the text's, in all layers'
    self-attention.

    Attributes:
        length: how many there are in each layer.
    """

    length: int = 20

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length is {self.length}; use 1 or more, as 20")

    def add_to(self, model: nn.Module) -> None:
        attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
        if not attentions:
            raise ConfigError(
                "model.peft is a prefix, which this kind of model has no place for; use lora"
            )
        for module in attentions:
            module.prefix = Prefix(
                self.length, module.heads, module.inner, module.out.weight.device
            )

    def owns(self, name: str) -> bool:
        return _ADDED.fullmatch(name) is not None

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return _STD if self.owns(name) else None


class Prefix(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, length: int, heads: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        self.keys = nn.Parameter(torch.empty(length, inner, device=device))
        self.values = nn.Parameter(torch.empty(length, inner, device=device))

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """For keys [B, H, S, K] those of the prefix and its values, [B, H, n, K] each, in the same
        precision.
        """
        own = (
            part.to(like.dtype).view(len(part), self.heads, -1).transpose(0, 1)
            for part in (self.keys, self.values)
        )
        keys, values = (part.expand(len(like), -1, -1, -1) for part in own)
        return keys, values


def names(model: nn.Module) -> list[str]:
    """Of the parameters, layer by layer: the keys, then the values."""
    return [name for name, _ in model.named_parameters() if _ADDED.fullmatch(name)]
