"""What all models offer to the rest of the trainer, whatever they are put together from."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
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
        prompt: puts learned embeddings before those of the text (`peft.prompt`).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.run_layers: Callable[..., Tensor] = run_layers
        self.head: nn.Module
        self.prompt: nn.Module | None = None

    @property
    def inserted(self) -> int:
        """Cells that the model puts before a text's."""
        return 0 if self.prompt is None else self.config.virtual_tokens

    def with_prompt(self, column: Tensor | None) -> Tensor | None:
        """Segments, or what is of a prefix, of the text's cells and those put before them: [B, S] -> [B, n + S]."""
        return column if column is None or self.prompt is None else F.pad(column, (self.inserted, 0), value=1)

    def read(self, predicted: Tensor | None) -> Tensor | None:
        """The cells that the head reads, counted with those that are put before a text's: int [B, P] -> [B, P].

        A head of an encoder that reads the first cell of a sequence reads the first of all.
        """
        first = self.config.head in ("classification", "multiple_choice") and not self.config.decoder
        return predicted if predicted is None or first else predicted + self.inserted

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
        config, shape = self.config, self.get_parameter(name).shape
        added = None if config.peft is None else config.peft.initial_std(name, shape)
        stds = config.initial_std(name) if added is None else (added,)
        size = shape.numel() // len(stds)
        parts = []
        for part, std in enumerate(stds):
            first, last = (min(max(place, part * size), (part + 1) * size) for place in (start, stop))
            bound = config.normal_bound
            parts.append(initial_values(name, first, last, seed=seed, std=std, bound=bound))
        return torch.cat(parts)

    def head_flops(self) -> int:
        """`matrix_flops` of the head, for each predicted token, or cell that a task's head reads."""
        own = matrix_flops(self.head)
        shares = self.config.head == "language_model" and self.config.tied
        return own + _flops(self.get_parameter("embeddings.tokens.weight")) if shares else own


def matrix_flops(module: nn.Module, only: str = "", without: str | None = None) -> int:
    """FLOPs of a cell in the matrices whose names contain `only` and do not contain `without`, forwards and backwards.

    6 per weight: 2 in the forward pass, 2 each for the gradients of what goes in and of the weight; without the latter
    where it is frozen. (What comes before all that is trained has no backward pass, and is counted as if it had.)
    """
    return sum(
        _flops(weight)
        for name, weight in module.named_parameters()
        if weight.ndim == 2 and ".prefix." not in name and only in name and (without is None or without not in name)
    )


def _flops(weight: Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()
