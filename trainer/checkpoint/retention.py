"""Which committed steps are kept: the newest valid ones, every n-th step, and the best one."""

from __future__ import annotations

from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location


def outdated_steps(
    root: Location,
    keep_last: int,
    keep_every: int | None,
    check: integrity.Check,
    best: int | None = None,
    known: dict[str, bytes] | None = None,
) -> list[int]:
    """Returns the committed steps to remove.

    With keep_last=2, steps 1 to 6, and step 5 damaged, the steps 4, 5 and 6 are kept: the damaged
    one does not count, so that a run always has `keep_last` steps to fall back on.

    Args:
        root: folder of a run's checkpoints.
        keep_last: number of newest valid steps to keep, with the damaged ones among them.
        keep_every: steps that this divides are kept as well.
        check: called for the newest steps only, until enough of them are valid.
        best: this step is kept as well.
        known: as for `integrity.listed`.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    older, valid = integrity.committed_steps(root, known), 0
    while older and valid < keep_last:
        folder = integrity.step_folder(root, older.pop())
        # `older` loses its newest step each time, so what remains is older than all that stay.
        valid += integrity.find_damage(folder, check) is None
    return [step for step in older if step != best and (keep_every is None or step % keep_every)]


def best_step(root: Location) -> int | None:
    """Returns the best step of a run, as its newest readable checkpoint names it, or None.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    best: int | None = integrity.newest_meta(root).get("best", {}).get("step")
    return best
