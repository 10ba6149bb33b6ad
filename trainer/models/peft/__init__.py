"""Parameter-efficient fine-tuning: `model.peft: {kind: lora}` is the module `lora`.

A module's `Config` is a `Peft`: it adds parameters to a built model. Only these, a
task's head and, for some kinds, norms are trained; all else is frozen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from samestep.config import kind_name
from samestep.errors import ConfigError


class Peft(ABC):
    """Parameter-efficient fine-tuning: the `Config` of a module of this package."""

    @property
    def length(self) -> int:
        """Number of positions inserted before a text."""
        return 0

    @property
    def trains_norms(self) -> bool:
        """Whether the layers' norms are trained too."""
        return False

    @property
    def merges(self) -> bool:
        """Whether `merge` can fold the added parameters into plain weights."""
        return False

    @abstractmethod
    def add_to(self, model: nn.Module) -> None:
        """Adds parameters to a model, on the model's device, without values.

        Raises:
            ConfigError: the model has no place for them.
        """

    @abstractmethod
    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        """Standard deviation of an added parameter's initial values; None: it was not added."""

    def owns(self, name: str) -> bool:
        """Whether the parameter `name` was added."""
        return self.initial_std(name, (1, 1)) is not None

    def merge(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters, by name, of an equivalent model without the added ones."""
        kind = kind_name(self)
        raise ConfigError(
            f"parameters of kind {kind} cannot be merged into plain weights. Use kind: lora."
        )
