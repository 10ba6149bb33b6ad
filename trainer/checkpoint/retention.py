"""Which checkpoints make room for others.

Neither the newest sound ones nor the milestones, nor the best.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.errors import CheckpointError, ObjectNotFoundError, StorageError


def outdated_steps(
    root: Location,
    keep_last: int,
    keep_every: int | None,
    check: Callable[[Location], None],
    best: int | None = None,
) -> list[int]:
    """The committed steps that are to go.

    Older than the newest sound ones, no milestones, and not the best.

    Args:
        root: the folder of a run's checkpoints.
        keep_last: how many of the newest sound ones stay, with the damaged ones among them.
        keep_every: steps that this divides stay, too; None for none.
        check: what a sound one passes without a CheckpointError; called for the newest only.
        best: this one stays, too.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    older, sound = integrity.committed_steps(root), 0
    while older and sound < keep_last:
        sound += damage(integrity.step_folder(root, older.pop()), check) is None
    return [step for step in older if step != best and (keep_every is None or step % keep_every)]


def best_step(root: Location) -> int | None:
    """The step that a run has found to be the best, as the newest readable checkpoint says.

    None if it names none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    for step in reversed(integrity.committed_steps(root)):
        with suppress(CheckpointError):
            best: int | None = (
                integrity.read_meta(integrity.step_folder(root, step)).get("best", {}).get("step")
            )
            return best
    return None


def damage(folder: Location, check: Callable[[Location], None]) -> str | None:
    """What is wrong with a committed step, by one of the checks of `integrity`; None if nothing is.

    Raises:
        StorageError: the store does not answer, which says nothing about the checkpoint.
    """
    try:
        check(folder)
    except CheckpointError as error:
        if isinstance(error, StorageError) and not isinstance(error, ObjectNotFoundError):
            raise
        return str(error)
    return None
