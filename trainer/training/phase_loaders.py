"""The batches of a run: a loader for each phase, and held-out batches of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.training.passes import Loader
from trainer.training.phases import Phase


class OpenLoader(Protocol):
    """Opens the batches of a phase: endless ones for training, one pass over the held-out split."""

    def __call__(self, phase: Phase, split: str = "train") -> Loader: ...


class PhaseLoaders:
    """Loaders of training batches, one for each phase and open until the phase has ended.

    Args:
        phases: of the run, in order.
        open_loader: opens the batches of one of them.
    """

    def __init__(self, phases: tuple[Phase, ...], open_loader: OpenLoader) -> None:
        self.phases = phases
        self._open = open_loader
        self._loaders = [open_loader(phase) for phase in phases]

    def train(self, phase: Phase) -> Loader:
        """The training batches of a phase."""
        return self._loaders[phase.index]

    def heldout(self, phase: Phase) -> Loader:
        """Opens one pass over the held-out documents, in examples as those of the phase."""
        return self._open(phase, "heldout")

    def end(self, phase: Phase, following: Phase) -> None:
        """Closes the loader of a phase; the next one of the same data order goes on from there."""
        ended = self.train(phase)
        ended.close()
        if phase.index < following.index and phase.order == following.order:
            self.train(following).load_state_dict(ended.state_dict())

    def reopen(self, phases: Sequence[Phase]) -> None:
        """Opens the loaders of phases that have ended and are trained once more."""
        for phase in phases:
            self._loaders[phase.index] = self._open(phase)

    def close(self) -> None:
        """Stops what makes batches in the background."""
        for loader in self._loaders:
            loader.close()
