"""What all models offer to the rest of the trainer, whatever they are put together from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.initialization import initial_values
from trainer.models.layers import run_layers


class Model(nn.Module):
    """A Transformer of one or two stacks of layers, with a head.

    Attributes:
        config: what it was built from.
        activation_checkpointing: recomputes each layer in the backward pass instead of keeping its activations.
        run_layers: runs a stack of layers; a strategy may put another way to do so in its place.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.run_layers: Callable[..., Tensor] = run_layers
        self.head: nn.Module

    def stacked(self) -> dict[str, int]:
        """How many tensors of equal size lie in the rows of a parameter, by name: queries', keys' and values', say."""
        parts = {"attention.qkv": 3, "cross_attention.kv": 2} | ({"ffn.up": 2} if self.config.gated else {})
        return {
            name: count
            for name, _ in self.named_parameters()
            for module, count in parts.items()
            if name.rpartition(".")[0].endswith(f".{module}")
        }

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: fp32 [stop - start], the same in any process."""
        stds = self.config.initial_std(name)
        size = self.get_parameter(name).numel() // len(stds)
        parts = []
        for part, std in enumerate(stds):
            first, last = (min(max(place, part * size), (part + 1) * size) for place in (start, stop))
            bound = self.config.normal_bound
            parts.append(initial_values(name, first, last, seed=seed, std=std, bound=bound))
        return torch.cat(parts)

    def head_weights(self) -> int:
        """Weights that the head multiplies with, for each predicted token, or cell that a task's head reads."""
        own = matrix_weights(self.head)
        shares = self.config.head == "language_model" and self.config.tied
        return own + self.config.vocab_size * self.config.width if shares else own


def matrix_weights(module: nn.Module, only: str = "", without: str | None = None) -> int:
    """The number of weights in the matrices whose names contain `only` and do not contain `without`."""
    return sum(
        weight.numel()
        for name, weight in module.named_parameters()
        if weight.ndim == 2 and only in name and (without is None or without not in name)
    )
