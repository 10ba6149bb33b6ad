"""The loaders of a run: one for the training batches of each phase, and held-out batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.training.passes import Loader
from trainer.training.phases import Phase


class OpenLoader(Protocol):
    """Opens the batches of a phase: endless for training, a single pass for the held-out split."""

    def __call__(self, phase: Phase, split: str = "train") -> Loader: ...


class PhaseLoaders:
    """Loaders of training batches, one for each phase in order, open until the phase has ended."""

    def __init__(self, phases: tuple[Phase, ...], open_loader: OpenLoader) -> None:
        self.phases = phases
        self._open = open_loader
        # All at once, so an error in the data of a later phase shows at the start of the run.
        self._loaders = [open_loader(phase) for phase in phases]

    def train(self, phase: Phase) -> Loader:
        """The training batches of a phase."""
        return self._loaders[phase.index]

    def heldout(self, phase: Phase) -> Loader:
        """Opens the held-out documents once, in examples of the phase's length."""
        return self._open(phase, "heldout")

    def end(self, phase: Phase, following: Phase) -> None:
        """Closes a phase's loader; the next phase of the same data order continues its position."""
        ended = self.train(phase)
        ended.close()
        if phase.index < following.index and phase.order == following.order:
            self.train(following).load_state_dict(ended.state_dict())

    def reopen(self, phases: Sequence[Phase]) -> None:
        """Reopens the loaders of ended phases that a rewind trains again."""
        for phase in phases:
            self._loaders[phase.index] = self._open(phase)

    def close(self) -> None:
        """Stops the loaders' background threads."""
        for loader in self._loaders:
            loader.close()
