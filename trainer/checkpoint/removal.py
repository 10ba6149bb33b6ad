"""Which folders of a run's checkpoints are removed, and when.

A save first removes what interrupted saves have left, and steps from which the run did not
continue; after it, old checkpoints are removed. A holder of a lease removes only folders that no
later holder can have made (`trainer.checkpoint.lease`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.checkpoint import files, history, holding, integrity, retention
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
        # There may be hundreds of checkpoints and leases, and training waits for the look before a
        # save. What is committed stays so until it is removed, and what a lease has decided does
        # not change, so each is read once.
        self._known: dict[str, bytes] = {}
        self._holds = holding.Holds(root)

    def before_save(self, step: int) -> None:
        """Removes interrupted saves, and steps that the run has not continued from, or repeats."""
        if self._lease is not None:
            for leftover in self._lease.abandoned():
                files.remove_folder(leftover, first=history.NUMBER)
        saved = integrity.listed(self._root, self._known)
        for each in saved:
            if not each.committed and self._may_remove(each.place):
                logger.info("removing %s: saving it was interrupted", each.place)
                self._remove(each.place)
            elif each.committed and not each.counts and self._may_remove(each.place):
                logger.warning("removing %s: the run resumed from an earlier step", each.place)
                self._remove(each.place)
        self._remove_later(saved, step - 1)

    def after(self, step: int) -> None:
        """Removes later steps."""
        self._remove_later(integrity.listed(self._root, self._known), step)

    def _remove_later(self, saved: Sequence[integrity.Saved], step: int) -> None:
        # The newest first: if this is interrupted, the rest is still the start of the history.
        for each in reversed(saved):
            is_later = each.committed and each.counts and each.step > step
            if is_later and self._may_remove(each.place):
                logger.warning("removing step %d: the run resumed from an earlier step", each.step)
                self._remove(each.place)

    def outdated(self, last: int, every: int | None, kept: int | None) -> None:
        """Removes what retention does not keep, once no reader holds it any more.

        A failure is only a warning: the save succeeded.

        Args:
            last, every: `keep_last` and `keep_every`.
            kept: a step that stays, the best one.
        """
        try:
            check, known = integrity.check_sizes, self._known
            steps = retention.outdated_steps(self._root, last, every, check, kept, known)
            held = self._holds.held() if steps else set()
            for step in steps:
                folder = integrity.step_folder(self._root, step)
                with holding.unless_held(folder) as free:
                    if not free or folder.name in held:
                        logger.info("%s is being read, and is removed later", folder)
                    elif self._may_remove(folder):
                        self._remove(folder)
        except CheckpointError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    def failed(self, folder: Location) -> None:
        """Removes the files of a save that has failed; what is left, the next save removes."""
        try:
            if self._lease is None:
                self._remove(folder)
            else:  # another rank may still write there
                integrity.clear_step(folder)
        except CheckpointError as error:
            logger.debug("%s was not removed: %s", folder, error)

    def _remove(self, folder: Location) -> None:
        self._known.pop(folder.name, None)
        integrity.remove_step(folder)

    def _may_remove(self, folder: Location) -> bool:
        return self._lease is None or self._lease.may_remove(folder)
