"""Measures a run and writes down what was measured.

`metrics.jsonl` is the record; the terminal line, W&B and plots are projections of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

Level: TypeAlias = Literal["INFO", "WARN", "ERROR"]
"""How bad it is that people are told of."""


class Tracker(Protocol):
    """Somewhere metrics are written to; made on rank 0 only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics, named like `train/loss`, as they are after `step` updates; steps never decrease."""
        ...

    def alert(self, level: Level, title: str, text: str) -> None:
        """Tells people, within seconds or not at all; most trackers have no way to, and do nothing.

        An ERROR is the end of the run and its last word. It may come from another thread than the rest, as the one that
        trains may hang.
        """
        return  # what those that have no way to inherit

    def close(self) -> None:
        """Writes what is still held back."""
        ...
