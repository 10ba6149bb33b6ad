"""The lease of a training on the folder of its checkpoints: a number that only ever grows.

A lock that expires (`trainer.checkpoint.lock`) keeps two trainings apart, except for one that was
frozen for longer than the lock lasts and then continues, between any two of its operations. The
lease makes what such a training still does harmless, without a clock and without a vote:

1. Of several trainings that take over at once, one creates the next lease; the store decides.
2. A holder creates its lease *before* it lists the checkpoints to continue from. It commits a
   checkpoint *before* it looks for a higher lease, and relies on the checkpoint only if there is
   none. So if the former holder relies on a checkpoint, the next holder has it in its list: either
   the list is later than the commit, or the lease is earlier than the look.
3. The lease then names the checkpoint that its holder continues from, and readers ignore what was
   committed beside this line (`trainer.checkpoint.history`).
4. A holder writes in folders that no other holder writes in, and removes only folders that were
   there when it took over, or that it has made. So a late write or removal hits no later holder.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import NoReturn

from samestep import log
from samestep.errors import EXIT_REGROUP, SupersededError
from trainer.checkpoint import files, history, integrity
from trainer.checkpoint.files import Location

logger = logging.getLogger(__name__)


class Lease:
    """A lease that this process holds.

    Attributes:
        root: folder of the run's checkpoints.
        number: one more than the number of the former lease.
    """

    def __init__(self, root: Location, number: int) -> None:
        self.root, self.number = root, number
        self._token = uuid.uuid4().hex
        self._record = history.Record(number)
        self._found: frozenset[str] = frozenset()  # in the folder, when this holder decided

    @classmethod
    def take(cls, root: Location) -> Lease | None:
        """Creates the next lease; None if another process has created it meanwhile.

        Raises:
            CheckpointError: which steps count is unknown, see `integrity.listed`.
        """
        names = files.names(root)
        # Folders may have been copied here without the leases.
        named = [folder.lease or 0 for folder in history.folders(names)]
        named += [saved.lease for saved in integrity.listed(root)]
        lease = cls(root, 1 + max([0, *history.lease_numbers(names), *named]))
        if not files.create(root / history.lease_name(lease.number), lease._content()):
            return None
        # Another process may have taken this number and a third the next one, and removed the
        # file below after `names` was read. A number then exists twice, but never the newest.
        if lease._newest() != lease.number:
            return None
        # Leases of commands that save nothing, such as studies, would become ever more.
        for number in history.lease_numbers(names):
            record = history.read_record(root, number)
            if record is not None and record.step is None and not record.is_damaged:
                files.remove(root / history.lease_name(number))
        return lease

    def check(self) -> None:
        """Checks that no other process has taken the folder over.

        Raises:
            SupersededError: one has.
            CheckpointError: the folder cannot be listed.
        """
        newest = self._newest()
        if newest != self.number:
            raise SupersededError(
                f"another training has taken {self.root} over, as this one gave no sign of life "
                f"(its lease is {self.number}, the newest {newest}). This process ends, to keep "
                "their files apart; if it is part of an elastic run, it joins the others. If these "
                "are two runs, start one of them with another output"
            )

    def check_or_end(self) -> None:
        """Ends this process at once if another one has taken the folder over.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        try:
            self.check()
        except SupersededError as error:
            end(error)

    @property
    def has_decided(self) -> bool:
        """Whether the lease says what its holder continues from."""
        return self._record.step is not None

    def decide(self, step: int | None, of: int) -> None:
        """Writes down which checkpoint this holder continues from, once.

        Args:
            step: of a checkpoint that was listed after the lease was taken; None: from nothing.
            of: number of the lease that has written it.
        """
        names = files.names(self.root)
        self._found = frozenset(names)
        # An earlier holder may have removed its own folders; what it found is in its lease.
        known = [folder.step for folder in history.folders(names)]
        for number in reversed(history.lease_numbers(names)):
            former = history.read_record(self.root, number)
            if number < self.number and former is not None and former.step is not None:
                known.append(former.names_after)
                break
        step = history.NOTHING if step is None else step
        names_after = max(known, default=history.NOTHING)
        self._record = history.Record(self.number, step, of, names_after)
        files.write(self.root / history.lease_name(self.number), self._content())
        # Older leases that are not on the line decide nothing any more.
        needed = {stretch.lease for stretch in history.line(self.root, names)}
        for number in history.lease_numbers(names):
            if number < self.number and number not in needed:
                files.remove(self.root / history.lease_name(number))

    def claim(self, step: int) -> Location:
        """Makes the folder of a step, in which no other holder writes.

        That is step-00000006 unless an earlier holder has used the name, whose ranks may still
        write there; else step-00000006-lease-2.
        """
        plain = history.plain_name(step)
        own = f"{plain}-lease-{self.number}"
        names = [plain, own] if step > self._record.names_after else [own]
        content = str(self.number).encode()
        for name in names:
            folder = self.root / name
            if files.claim(folder, history.NUMBER, content):
                return folder
            # It holds a save of this process that failed.
            if files.read_if_there(folder / history.NUMBER) == content:
                return folder
        raise SupersededError(
            f"{self.root / own} was written by another run with lease {self.number}, so two runs "
            f"write to {self.root}. Stop one of them, or give it another output."
        )

    def may_remove(self, folder: Location) -> bool:
        """Whether no later holder can have made a folder."""
        if folder.name in self._found:
            return True
        return files.read_if_there(folder / history.NUMBER) == str(self.number).encode()

    def abandoned(self) -> list[Location]:
        """Folders that killed processes left while they made them, and that are still there."""
        found = {name for name in self._found if name.startswith(files.CLAIMING)}
        if found:  # rarely; an earlier save may have removed them
            found.intersection_update(files.names(self.root))
        return [self.root / name for name in sorted(found)]

    def _newest(self) -> int:
        return max(history.lease_numbers(files.names(self.root)), default=0)

    def _content(self) -> bytes:
        record = self._record
        content = {"step": record.step, "of": record.of, "names_after": record.names_after}
        return files.seal({**content, "token": self._token})


def end(error: SupersededError) -> NoReturn:
    """Ends this process, whose folder another one has taken over.

    At once, with no cleanup: the other threads must not write any more.
    """
    logger.error("error: %s", error)
    # The agent of an elastic run then joins the others, which have continued without this process.
    log.exit_now(EXIT_REGROUP if "RANK" in os.environ else error.exit_code)
