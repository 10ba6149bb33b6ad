"""Prefix tuning (Li & Liang 2021, arXiv 2101.00190): extra keys and values in every layer.

They are parameters, as in P-tuning v2 (Liu et al. 2021); in the paper a network computes them. The
text's positions follow theirs, as in Hugging Face's `peft`; T5's relative bias is 0 for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.attention import SelfAttention
from trainer.models.peft import Peft

_ADDED = re.compile(r".*\.prefix\.(keys|values)")


@dataclass(frozen=True)
class Config(Peft):
    """Prefix tuning: learned keys and values in each self-attention, visible to all positions.

    Attributes:
        length: number of keys in each layer.
    """

    length: int = 20

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length is {self.length}. Use 1 or more, such as 20.")

    def add_to(self, model: nn.Module) -> None:
        attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
        if not attentions:
            raise ConfigError("model.peft prefix does not fit this kind of model. Use lora.")
        for module in attentions:
            device = module.out.weight.device
            module.prefix = Prefix(self.length, module.heads, module.inner, device)

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return 0.02 if _ADDED.fullmatch(name) else None


class Prefix(nn.Module):
    """The keys and values of one layer."""

    def __init__(self, length: int, heads: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        self.keys = nn.Parameter(torch.empty(length, inner, device=device))
        self.values = nn.Parameter(torch.empty(length, inner, device=device))

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix, [B, H, n, K] each, for a text's keys [B, H, S, K]."""
        return self._split(self.keys, like), self._split(self.values, like)

    def _split(self, part: Tensor, like: Tensor) -> Tensor:
        heads = part.to(like.dtype).view(len(part), self.heads, -1).transpose(0, 1)
        return heads.expand(len(like), -1, -1, -1)


def names(model: nn.Module) -> list[str]:
    """Names of the prefix parameters, layer by layer: the keys, then the values."""
    return [name for name, _ in model.named_parameters() if _ADDED.fullmatch(name)]
