"""Where the state of a run is saved, and after which steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.checkpoint.manager import Checkpointer


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        durable: those on disk or in an object store.
        snapshots: those in the memory of the machines, taken between the others; None takes none.
    """

    durable: Checkpointer
    snapshots: Checkpointer | None = None

    def due(self, step: int, ending: bool) -> list[Checkpointer]:
        """Where to save after a step, if anywhere; a run ends with a durable checkpoint only."""
        due = [self.durable] if ending or step % self.durable.config.every == 0 else []
        if self.snapshots is not None and not ending and step % self.snapshots.config.every == 0:
            due.append(self.snapshots)
        return due

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserves the host memory for saves of such tensors."""
        self.durable.reserve(tensors)
        if self.snapshots is not None:
            self.snapshots.reserve(tensors)

    def discard_after(self, step: int) -> None:
        """Removes what was saved after a step, so that a restart goes on from there, too."""
        self.durable.discard_after(step)
        if self.snapshots is not None:
            self.snapshots.discard_after(step)
