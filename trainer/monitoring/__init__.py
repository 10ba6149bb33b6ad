"""Measures a run and writes down what was measured.

`metrics.jsonl` is the record; the terminal line, W&B and plots are projections of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Somewhere metrics are written to; made on rank 0 only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics, named like `train/loss`, as they are after `step` updates; steps never decrease."""
        ...

    def close(self) -> None:
        """Writes what is still held back."""
        ...
