"""Which folders of a run's checkpoints are removed, and when.

A save first removes what interrupted saves have left, and steps from which the run did not
continue; after it, old checkpoints are removed. A holder of a lease removes only folders that no
later holder can have made (`trainer.checkpoint.lease`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from samestep.errors import CheckpointError
from trainer.checkpoint import files, history, holding, integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease

logger = logging.getLogger(__name__)

_READ_SECONDS = 30.0  # that readers get to finish; all ranks wait meanwhile
_LOOK_SECONDS = 1.0


class Removal:
    """Removes folders for one training.

    Args:
        root: folder of the run's checkpoints.
        lease: of this training; None if it has none, as in a conversion.
    """

    def __init__(self, root: Location, lease: Lease | None) -> None:
        self._root, self._lease = root, lease
        # Training waits for the look before a save. What is committed stays so until it is removed,
        # and what a lease has decided does not change.
        self._known: dict[str, bytes] = {} if lease is None else lease.known
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
                if self._remove_unless_held(each.place):
                    logger.warning("removed %s: the run resumed from an earlier step", each.place)
                else:  # it does not count, so it may stay
                    logger.info("%s is being read, and is removed later", each.place)
        self._remove_later(saved, step - 1)

    def after(self, step: int) -> None:
        """Removes later steps."""
        self._remove_later(integrity.listed(self._root, self._known), step)

    def _remove_later(self, saved: Sequence[integrity.Saved], step: int) -> None:
        deadline = time.monotonic() + _READ_SECONDS
        # The newest first: if this is interrupted, the rest is still the start of the history.
        for each in reversed(saved):
            is_later = each.committed and each.counts and each.step > step
            if is_later and self._may_remove(each.place):
                logger.warning("removing step %d: the run resumed from an earlier step", each.step)
                self._remove_once_read(each.place, deadline)

    def outdated(self, last: int, every: int | None, kept: int | None) -> None:
        """Removes what retention does not keep, once no reader holds it any more.

        A failure is only a warning: the save succeeded.

        Args:
            last, every: `keep_last` and `keep_every`.
            kept: a step that stays, the best one.
        """
        try:
            check, known = integrity.check_sizes, self._known
            steps = outdated_steps(self._root, last, every, check, kept, known)
            for step in steps:
                folder = integrity.step_folder(self._root, step)
                if self._may_remove(folder) and not self._remove_unless_held(folder):
                    logger.info("%s is being read, and is removed later", folder)
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

    def _remove_unless_held(self, folder: Location) -> bool:
        """Removes a step; returns False, and leaves it, while a reader holds it."""
        with holding.unless_held(folder, self._holds.held()) as free:
            if free:
                integrity.uncommit(folder)
        if free:  # NFS keeps a file that is open in its folder, which could not be removed
            self._remove(folder)
        return free

    def _remove_once_read(self, folder: Location, deadline: float) -> None:
        """Removes a step that counts, and from which a restart must not continue.

        So it stays for its readers until the deadline only.
        """
        while not self._remove_unless_held(folder):
            if time.monotonic() > deadline:
                logger.warning("%s is still being read; removing it nevertheless", folder)
                self._remove(folder)
                return
            time.sleep(_LOOK_SECONDS)

    def _remove(self, folder: Location) -> None:
        self._known.pop(folder.name, None)
        integrity.remove_step(folder)

    def _may_remove(self, folder: Location) -> bool:
        return self._lease is None or self._lease.may_remove(folder)


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
