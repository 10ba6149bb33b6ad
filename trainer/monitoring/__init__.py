"""Measures a run and records the metrics.

`metrics.jsonl` is the record; the terminal, TensorBoard, W&B and plots show what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

Level: TypeAlias = Literal["INFO", "WARN", "ERROR"]
"""Severity of an alert."""


class Tracker(Protocol):
    """A destination of metrics; exists on rank 0 only."""

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Writes metrics, named like `train/loss`, after `step` updates. Steps never decrease."""
        ...

    def alert(self, level: Level, title: str, text: str) -> None:
        """Notifies people, within seconds or not at all. The default does nothing.

        An ERROR ends the run. It may come from another thread, because the training thread may
        hang.
        """
        return

    def close(self) -> None:
        """Flushes and closes."""
        ...

    def complete(self) -> bool:
        """Sends again, after `close`, if rows of metrics.jsonl were lost, as on a full disk.

        Returns:
            Whether the destination has all rows now. The default loses none.
        """
        return True
