"""Which folders of a run's checkpoints are removed, and when.

A save first removes what interrupted saves have left, and steps from which the run did not
continue; after it, old checkpoints are removed. A holder of a lease removes only folders that no
later holder can have made (`trainer.checkpoint.lease`).
"""

from __future__ import annotations

import logging

from trainer.checkpoint import files, history, integrity, retention
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease
from trainer.errors import CheckpointError

logger = logging.getLogger(__name__)


class Removal:
    """Removes folders for one training.

    Args:
        root: folder of the run's checkpoints.
        lease: of this training; None if it has none, as in a conversion.
    """

    def __init__(self, root: Location, lease: Lease | None) -> None:
        self._root, self._lease = root, lease

    def leftovers(self) -> None:
        """Removes interrupted saves, and steps of trainings that the run did not continue from."""
        if self._lease is not None:
            for leftover in self._lease.abandoned():
                files.remove_folder(leftover, first=history.NUMBER)
        for leftover in integrity.uncommitted_folders(self._root):
            if self._may_remove(leftover):
                logger.info("removing %s: saving it was interrupted", leftover)
                integrity.remove_step(leftover)
        for superseded in integrity.superseded_folders(self._root):
            if self._may_remove(superseded):
                logger.warning("removing %s: the run resumed from an earlier step", superseded)
                integrity.remove_step(superseded)

    def after(self, step: int) -> None:
        """Removes later steps, the newest first: if it is interrupted, the rest is a history."""
        for later in reversed(integrity.committed_steps(self._root)):
            folder = integrity.step_folder(self._root, later)
            if later > step and self._may_remove(folder):
                logger.warning("removing step %d: the run resumed from an earlier step", later)
                integrity.remove_step(folder)

    def outdated(self, last: int, every: int | None, kept: int | None) -> None:
        """Removes what retention does not keep. A failure is only a warning: the save succeeded.

        Args:
            last, every: `keep_last` and `keep_every`.
            kept: a step that stays, the best one.
        """
        try:
            check = integrity.check_sizes
            for step in retention.outdated_steps(self._root, last, every, check, kept):
                folder = integrity.step_folder(self._root, step)
                if self._may_remove(folder):
                    integrity.remove_step(folder)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    def failed(self, folder: Location) -> None:
        """Removes the files of a save that has failed; what is left, the next save removes."""
        try:
            if self._lease is None:
                integrity.remove_step(folder)
            else:  # another rank may still write there
                integrity.clear_step(folder)
        except CheckpointError as error:
            logger.debug("%s was not removed: %s", folder, error)

    def _may_remove(self, folder: Location) -> bool:
        return self._lease is None or self._lease.may_remove(folder)
