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
from collections.abc import Collection
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
        known: small files that do not change any more, see `integrity.listed`. There may be
            hundreds of checkpoints and leases, so each is read once.
    """

    def __init__(self, root: Location, number: int, known: dict[str, bytes]) -> None:
        self.root, self.number, self.known = root, number, known
        self._token = uuid.uuid4().hex
        self._record = history.Record(number)
        self._found: frozenset[str] = frozenset()  # in the folder, when this holder decided

    @classmethod
    def take(cls, root: Location) -> Lease | None:
        """Creates the next lease; None if another process has created it meanwhile.

        Raises:
            CheckpointError: which steps count is unknown, see `integrity.listed`.
        """
        names, known = files.names(root), dict[str, bytes]()
        # Folders may have been copied here without the leases.
        named = [folder.lease or 0 for folder in history.folders(names)]
        named += [saved.lease for saved in integrity.listed(root, known, names)]
        lease = cls(root, 1 + max([0, *history.lease_numbers(names), *named]), known)
        if not files.create(root / history.lease_name(lease.number), lease._content()):
            return None
        # Another process may have taken this number and a third the next one, and removed the
        # file below after `names` was read. A number then exists twice, but never the newest.
        if _newest(files.names(root)) != lease.number:
            return None
        # Leases of commands that save nothing, such as studies, would become ever more.
        for number in history.lease_numbers(names):
            record = history.read_record(root, number, known)
            if record is not None and record.step is None and not record.is_damaged:
                files.remove(root / history.lease_name(number))
        return lease

    def check(self) -> list[str]:
        """Checks that no other process has taken the folder over.

        Returns:
            The names in the folder at the time of the check.

        Raises:
            SupersededError: one has.
            CheckpointError: the folder cannot be listed.
        """
        names = files.names(self.root)
        newest = _newest(names)
        if newest != self.number:
            raise SupersededError(
                f"another training has taken {self.root} over, as this one gave no sign of life "
                f"(its lease is {self.number}, the newest {newest}). This process ends, to keep "
                "their files apart; if it is part of an elastic run, it joins the others. If these "
                "are two runs, start one of them with another output"
            )
        return names

    def check_or_end(self) -> list[str]:
        """Like `check`, but ends this process at once if another one has taken the folder over."""
        try:
            return self.check()
        except SupersededError as error:
            end(error)

    @property
    def has_decided(self) -> bool:
        """Whether the lease says what its holder continues from."""
        return self._record.step is not None

    def decide(self, newest: int | None) -> None:
        """Writes down which checkpoint this holder continues from, once.

        Ends this process if another one has taken the folder over.

        Args:
            newest: no later checkpoint counts from now on; None: the run starts from nothing.

        Raises:
            CheckpointError: which steps count is unknown, see `integrity.listed`.
        """
        names = self.check_or_end()
        # From the listing of the check: the lease names the writer of that step as well.
        step, of = history.NOTHING, 0
        if newest is not None:
            for saved in integrity.listed(self.root, self.known, names):
                if saved.committed and saved.counts and saved.step <= newest:
                    step, of = saved.step, saved.lease  # the last one is the newest
        self._found = frozenset(names)
        # An earlier holder may have removed its own folders; what it found is in its lease.
        known = [folder.step for folder in history.folders(names)]
        for number in reversed(history.lease_numbers(names)):
            former = history.read_record(self.root, number, self.known)
            if number < self.number and former is not None and former.step is not None:
                known.append(former.names_after)
                break
        names_after = max(known, default=history.NOTHING)
        self._record = history.Record(self.number, step, of, names_after)
        own, content = history.lease_name(self.number), self._content()
        files.write(self.root / own, content)
        self.known[own] = content
        # Older leases that are not on the line decide nothing any more.
        needed = {stretch.lease for stretch in history.line(self.root, names, known=self.known)}
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

    def _content(self) -> bytes:
        record = self._record
        content = {"step": record.step, "of": record.of, "names_after": record.names_after}
        return files.seal({**content, "token": self._token})


def _newest(names: Collection[str]) -> int:
    return max(history.lease_numbers(names), default=0)


def end(error: SupersededError) -> NoReturn:
    """Ends this process, whose folder another one has taken over.

    At once, with no cleanup: the other threads must not write any more.
    """
    logger.error("error: %s", error)
    # The agent of an elastic run then joins the others, which have continued without this process.
    log.exit_now(EXIT_REGROUP if "RANK" in os.environ else error.exit_code)
