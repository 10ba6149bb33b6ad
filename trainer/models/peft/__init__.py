"""Parameter-efficient fine-tuning: `model.peft: {kind: lora}` is the module `lora`.

A module's `Config` is a `trainer.models.Peft`: it adds parameters to a model that is built, and
says which ones are trained; the others are frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Added:
    """What most ways of parameter-efficient fine-tuning have in common."""

    @property
    def length(self) -> int:
        return 0

    @property
    def trains_norms(self) -> bool:
        return False

    @property
    def merges(self) -> bool:
        return False

    def merge(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kind = type(self).__module__.rpartition(".")[2]
        raise ConfigError(f"what {kind} learned cannot be part of plain weights; use kind: lora")
