"""Parameter-efficient fine-tuning: `model.peft: {kind: lora}` is the module `lora`.

A module's `Config` adds parameters to a model that is built, and says which are trained; the others are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Peft(Protocol):
    """The `Config` of a module of this package."""

    def add_to(self, model: Any) -> None:
        """Adds the parameters to a model, on its device; they still need their values.

        Raises:
            ConfigError: the model has nothing to add them to.
        """
        ...

    def trains(self, name: str) -> bool:
        """Whether the parameter `name` is trained; a task's head is besides."""
        ...

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        """Standard deviation of an added parameter's initial values; None: it is one of the model itself."""
        ...
