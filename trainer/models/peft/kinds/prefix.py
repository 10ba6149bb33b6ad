"""Prefix tuning (Li & Liang 2021, arXiv 2101.00190): extra keys and values in every layer.

They are parameters, as in P-tuning v2 (Liu et al. 2021); or, as in the paper, each layer has a
network that computes them from an embedding of each position, which trains more steadily. The
text's positions follow theirs, as in Hugging Face's `peft`; T5's relative bias is 0 for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.layers.attention import SelfAttention
from trainer.models.peft import Peft

_ADDED = re.compile(r".*\.prefix\.(keys|values|positions|(inner|outer)\.(weight|bias))")


@dataclass(frozen=True)
class Config(Peft):
    """Prefix tuning: learned keys and values in each self-attention, visible to all positions.

    Attributes:
        length: number of keys in each layer.
        network_width: inner width of the networks that compute keys and values, as 512; null: they
            are parameters.
    """

    length: int = 20
    network_width: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length is {self.length}. Use 1 or more, such as 20.")
        if self.network_width is not None and self.network_width < 1:
            raise ConfigError(
                f"network_width is {self.network_width}. Use 1 or more, such as 512, or null."
            )

    def add_to(self, model: nn.Module) -> None:
        attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
        if not attentions:
            raise ConfigError("model.peft prefix does not fit this kind of model. Use lora.")
        for module in attentions:
            with module.out.weight.device:
                width = module.kv_heads * (module.inner // module.heads)
                module.prefix = Prefix(self, module.kv_heads, width)

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return 0.02 if _ADDED.fullmatch(name) else None


class Prefix(nn.Module):
    """The keys and values of one layer.

    With a network, they are the halves of outer(tanh(inner(positions))).

    Args:
        config: their number, and the width of the network.
        heads: of the layer's keys and values.
        width: of these heads together, H K.
    """

    def __init__(self, config: Config, heads: int, width: int) -> None:
        super().__init__()
        self.heads, length, inner = heads, config.length, config.network_width
        if inner is None:
            self.keys = nn.Parameter(torch.empty(length, width))
            self.values = nn.Parameter(torch.empty(length, width))
            return
        self.positions = nn.Parameter(torch.empty(length, width))
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, 2 * width)

    @property
    def has_network(self) -> bool:
        return hasattr(self, "outer")

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """The prefix of all heads, [n, H K] each."""
        if not self.has_network:
            return self.keys, self.values
        keys, values = self.outer(self.inner(self.positions).tanh()).chunk(2, -1)
        return keys, values

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix, [B, H, n, K] each, for a text's keys [B, H, S, K]."""
        keys, values = self.keys_and_values()
        return self._split(keys, like), self._split(values, like)

    def _split(self, part: Tensor, like: Tensor) -> Tensor:
        heads = part.to(like.dtype).view(len(part), self.heads, -1).transpose(0, 1)
        return heads.expand(len(like), -1, -1, -1)


def names(model: nn.Module) -> list[str]:
    """Names of prefixes that are parameters, layer by layer: the keys, then the values."""
    return [
        name
        for name, _ in model.named_parameters()
        if name.endswith(("prefix.keys", "prefix.values"))
    ]


@torch.no_grad()
def computed(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Keys and values of all layers in fp32, [n, H K] each, in the order of `names`.

    Args:
        model: with prefixes; it needs no values.
        tensors: its parameters.
    """
    found: list[Tensor] = []
    for name, module in model.named_modules():
        if isinstance(module, Prefix):
            own = {key: tensors[f"{name}.{key}"].float() for key, _ in module.named_parameters()}
            module.to_empty(device="cpu").load_state_dict(own)
            found += module.float().keys_and_values()
    return found
