"""The loaders of a run: one for the training batches of each phase, and held-out batches."""

from __future__ import annotations

from typing import Protocol

from data_pipeline.order.exclusions import merged
from samestep.errors import CheckpointError
from samestep.examples import LoaderState
from trainer.training.passes import Loader
from trainer.training.phases import Phase, examples_after, phase_of


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
        # Loaders from this index on are at the start of their phase.
        self._moved = 0
        # Index of the phase whose loader was given a position last.
        self._at = 0

    def train(self, phase: Phase) -> Loader:
        """The training batches of a phase."""
        return self._loaders[phase.index]

    def heldout(self, phase: Phase) -> Loader:
        """Opens the held-out documents once, in examples of the phase's length."""
        return self._open(phase, "heldout")

    def end(self, phase: Phase) -> None:
        """Closes a phase's loader; the next phase of the same data order continues its position."""
        ended = self.train(phase)
        ended.close()
        following = phase_of(self.phases, phase.end)
        self._moved = following.index + 1
        if phase.index < following.index and phase.order == following.order:
            self.train(following).load_state_dict(ended.state_dict(), phase.end)
            self._at = following.index

    def state(self, step: int) -> tuple[int, LoaderState]:
        """Returns the data order that the last of `step` steps consumed, and its loader's state."""
        last = phase_of(self.phases, max(0, step - 1))
        phase = self.phases[max(last.index, self._at)]
        return phase.order, self.train(phase).state_dict()

    def resume(self, step: int, order: int, state: LoaderState) -> None:
        """Continues the data order of a checkpoint, or begins the order of the next phase.

        The checkpoint may be from an earlier phase than the steps since.

        Args:
            step: of the checkpoint.
            order: number of the data order that the step belongs to. At the end of an order,
                checkpoints of earlier versions have the one that follows.
            state: of the loader then.

        Raises:
            CheckpointError: the phases have changed, and the step belongs to another order now; or
                `data.exclude` has new examples of an order that has ended.
            DataError: the state belongs to another order of the data.
        """
        last, following = (phase_of(self.phases, max(0, each)) for each in (step - 1, step))
        phase = following if order == following.order else last
        if order != phase.order:
            raise CheckpointError(
                f"the checkpoint of step {step} was saved in data order {order}, and "
                f"by this run's phases the step belongs to order {following.order} (each change of "
                "the sequence length begins one). Keep the phases that have begun, or start a new "
                "run from the checkpoint's weights with init_from"
            )
        # Ended loaders are closed. A later one may have been read, and must begin its order again.
        for moved in self.phases[phase.index : self._moved]:
            self.train(moved).close()
            self._loaders[moved.index] = self._open(moved)
        self._moved, self._at = following.index + 1, phase.index
        # Where its order has ended, this is still a check that it is the checkpoint's.
        loader = self.train(phase)
        loader.load_state_dict(state, step)
        if phase.order < following.order:
            if loader.state_dict()["excluded"] != merged(state.get("excluded", ())):
                raise CheckpointError(
                    "data.exclude has new examples. Their numbers are of the first data order, "
                    f"which has ended with step {step}: restore the setting"
                )
            loader.close()

    def start_at(self, step: int) -> None:
        """Moves new loaders to the batch of the update of `step`, from 0."""
        order, state = self.state(step)
        self.resume(step, order, {**state, "example": examples_after(self.phases, order, step)})

    def close(self) -> None:
        """Stops the loaders' background threads."""
        for loader in self._loaders:
            loader.close()
