"""The state that steps change: counts in a checkpoint's meta.json, and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trainer.optim import groups

Meta: TypeAlias = Mapping[str, Any]
"""The content of a checkpoint's meta.json. Older versions have written fewer keys."""


@dataclass
class TrainState:
    """Counts since the first step of the run, over all its restarts.

    Attributes:
        step: optimizer steps taken.
        examples: examples consumed; rows that only pad a batch are not counted.
        tokens: positions that the model read, padding included: examples times the width of their
            batch (all choices; of an encoder-decoder, sources and targets).
    """

    step: int = 0
    examples: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.examples, self.tokens = state["step"], state["examples"], state["tokens"]


def state_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, frozen: bool = False
) -> dict[str, Tensor]:
    """The state that steps change, by name; with `frozen`, the frozen parameters as well.

    Checkpoints leave frozen parameters out: they name the weights that have them instead.
    """
    tensors: dict[str, Tensor] = {
        f"model/{name}": parameter.detach()
        for name, parameter in parameters.items()
        if frozen or parameter.requires_grad
    }
    moments = groups.state_tensors(optimizer, parameters.items())
    return tensors | {f"optimizer/{name}": tensor for name, tensor in moments.items()}
