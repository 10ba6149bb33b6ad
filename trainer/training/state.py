"""Where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Meta: TypeAlias = Mapping[str, Any]
"""What the meta.json of a checkpoint says. Older versions have written less of it."""


@dataclass
class TrainState:
    """Counts since the first step of the run, over all its restarts.

    Attributes:
        step: optimizer steps taken.
        examples: examples consumed, padding not counted.
        tokens: cells of those examples (examples x sequence length).
    """

    step: int = 0
    examples: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.examples, self.tokens = state["step"], state["examples"], state["tokens"]
