"""Which step of a run is the best."""

from __future__ import annotations

from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location


def best_step(root: Location) -> int | None:
    """Returns the best step of a run, as its newest readable checkpoint names it, or None.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    best: int | None = integrity.newest_meta(root).get("best", {}).get("step")
    return best
