"""What looks at a run, or changes its course.

`trainer.training.compose` builds the observers that the settings ask for, in one tuple, and the
loop calls each hook in the order of that tuple; `trainer.training.run` adds probes at its end.
Numerical faults are no observer: they alone recompute a step, so the loop calls them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from trainer.training.passes import Gradients, MicroBatches
    from trainer.training.state import Meta


class Observer:
    """The hooks of the training loop; each does nothing unless overridden.

    All ranks call a hook at the same point of a step, so it may use collectives. As a context, an
    observer surrounds the steps.
    """

    def open(self, folder: Path | None, step: int) -> None:
        """Before the first step of a process, and after a rewind.

        Args:
            folder: the run's; None on ranks that write no files.
            step: number of steps taken.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...

    def begin_step(self, step: int, first: bool, look: bool) -> None:
        """Before the data of a step is there.

        Args:
            step: number of the step, from 1.
            first: whether it is the first of its phase, which may take long.
            look: whether it is time to look for files that a user may have made.
        """

    def before_clipping(self, step: int) -> None:
        """After the backward pass of a step, before its gradients are clipped."""

    def before_update(self, step: int) -> None:
        """Before the update of a step. Where graphs are compiled, it is inside one."""

    def after_update(self, step: int, micro_batches: MicroBatches, gradients: Gradients) -> None:
        """After the update of a step."""

    def end_step(self, step: int) -> Mapping[str, float]:
        """After a step that was counted; returns metrics for a row, which may be empty."""
        return {}

    def heldout_scores(self, phase: int) -> Mapping[str, float]:
        """Scores that an evaluation adds, equal on all ranks. The model is in eval mode."""
        return {}

    def evaluated(self, step: int, scores: Mapping[str, float], scored: object) -> None:
        """After an evaluation; scores with another `scored` (as JSON) cannot be compared."""

    def scores(self, step: int, last: bool) -> Iterator[Mapping[str, float]]:
        """Yields rows of further scores of the weights, if they are due after this step."""
        return iter(())

    def before_save(self, step: int, failed: int | None) -> None:
        """Before the state is saved; `failed` is a step whose checkpoint could not be saved."""

    def state_dict(self) -> Meta:
        """The part of a checkpoint's meta.json that this observer has written."""
        return {}

    def load_state_dict(self, meta: Meta) -> None:
        """After the state of a checkpoint was restored."""

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is kept beside the newest ones."""
        return None

    @property
    def ends_run(self) -> bool:
        """Whether the run ends before its last step."""
        return False

    def close(self) -> None:
        """At the end of the process."""
