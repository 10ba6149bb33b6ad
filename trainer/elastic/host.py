"""Which agent hosts the rendezvous: files `.host-00000003` in the run's folder.

The first host is the agent at the address of --rendezvous. It creates the record with the number 1
and its address, and renews it for as long as it is of use: while a round runs, or enough agents for
one are connected. Agents that cannot reach the host watch its record. If that does not change for a
while, one of them creates the next number, exclusively, and becomes the host. A host that finds a
higher number than its own, such as one that was frozen, gives up and joins there.

While a record is renewed, agents that cannot reach its host wait: of a network in parts, one part
goes on. No clocks of two machines are compared, and no votes are counted, so one agent can go on
alone where --elastic allows it.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.errors import CheckpointError
from samestep.stored_json import JsonError, checked, parse_json
from trainer.checkpoint import files
from trainer.checkpoint.files import Location

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\.host-(\d{8,})")
# A store is slow, and an operation is retried there for up to 31 s.
_RENEW_SECONDS, _RENEW_SECONDS_IN_STORE = 2.0, 10.0
_KEEP_SECONDS = 15.0  # after the host's last word
_SILENT_SECONDS, _SILENT_SECONDS_IN_STORE = 12.0, 45.0
_LOOKS = 10  # for a record that is there but cannot be read, as others come in its place


@dataclass(frozen=True)
class Record:
    """A host of the rendezvous.

    Attributes:
        number: one more than the number of the host before it.
        host, port: where agents reach it; "" and 0 in a record that is not completely written.
        renewals: how often it has renewed the record, or -1 if it has left.
        token: differs from the token of any other record.
    """

    number: int
    host: str
    port: int
    renewals: int
    token: str


class Records:
    """The hosts of a run, as an agent reads and creates them.

    Args:
        folder: of the run, which all its machines share.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._seen: Record | None = None
        self._since = self._looked = 0.0  # times of its first look and of the last one
        in_store = not isinstance(folder, Path)
        self._silent_seconds = _SILENT_SECONDS_IN_STORE if in_store else _SILENT_SECONDS
        self.renew_seconds = _RENEW_SECONDS_IN_STORE if in_store else _RENEW_SECONDS

    def newest(self) -> Record | None:
        """Reads the record with the highest number; None if there is none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        # Time before the look: a pause of this process after it must not count as silence.
        now = time.monotonic()
        for _ in range(_LOOKS):
            number = self.newest_number()
            if not number:
                return None
            # The next host may have removed it since the look.
            content = files.read_if_there(self._folder / _name(number))
            if content is not None:
                break
        else:
            raise CheckpointError(f"{self._folder / _name(number)} cannot be read")
        try:
            stored = parse_json(content, dict[str, object])
            found = checked({**stored, "number": number}, Record)
        except JsonError:  # its host still writes it, or was killed when it did
            found = Record(number, "", 0, 0, "")
        if found != self._seen:
            self._seen, self._since = found, now
        self._looked = now
        return found

    def newest_number(self) -> int:
        """Returns the number of the newest host; 0 if there is none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        names = files.names(self._folder)
        return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)

    @property
    def is_silent(self) -> bool:
        """Whether the host that `newest` has read has left, or has not renewed its record."""
        if self._seen is None:
            return False
        return self._seen.renewals < 0 or self._looked - self._since > self._silent_seconds

    def create(self, number: int, host: str, port: int) -> Record | None:
        """Creates a record; None if another agent has created it.

        Raises:
            CheckpointError: it cannot be written.
        """
        record = Record(number, host, port, 0, uuid.uuid4().hex)
        files.make_folder(self._folder)
        if not files.create(self._folder / _name(number), _content(record)):
            return None
        for name in files.names(self._folder):
            if (match := _NAME.fullmatch(name)) and int(match[1]) < number:
                files.remove(self._folder / name)
        return record

    def write(self, record: Record) -> None:
        """Writes the record of this host.

        Raises:
            CheckpointError: it cannot be written.
        """
        files.write(self._folder / _name(record.number), _content(record))


class Renewal(threading.Thread):
    """Renews the record of this agent, the host, and notices when another one has become the host.

    Attributes:
        is_over: whether there is another host.
        number: of this host.
    """

    def __init__(self, records: Records, record: Record) -> None:
        super().__init__(name="host", daemon=True)
        self.is_over = False
        self.number = record.number
        self._records, self._record = records, record
        self._stopped = threading.Event()
        self.keep(True)

    def run(self) -> None:
        while not (self._stopped.wait(self._records.renew_seconds) or self.check()):
            if time.monotonic() < self._kept_until:
                self._write(self._record.renewals + 1)

    def keep(self, is_of_use: bool) -> None:
        """Renews the record from now on if the host is of use, so that no other agent tries.

        The host says so again and again: the record of one that hangs becomes silent, too.

        Args:
            is_of_use: whether a round runs, or enough agents for one are connected.
        """
        self._kept_until = time.monotonic() + _KEEP_SECONDS if is_of_use else -math.inf

    def check(self) -> bool:
        """Looks for another host; returns `is_over`. An unreadable record changes nothing."""
        try:
            self.is_over = self._records.newest_number() > self._record.number
        except Exception as error:  # this thread must not end
            logger.debug("the host's record cannot be read: %s", error)
        return self.is_over

    def leave(self) -> None:
        """Says that this agent leaves, so that another one becomes the host at once."""
        self._stopped.set()
        if self.is_alive():
            self.join()
        if not self.check():
            self._write(-1)

    def _write(self, renewals: int) -> None:
        record = self._record
        self._record = Record(record.number, record.host, record.port, renewals, record.token)
        try:
            self._records.write(self._record)
        except Exception as error:  # a full disk or an unreachable store may recover
            logger.debug("the host's record was not renewed: %s", error)


def _name(number: int) -> str:
    return f".host-{number:08d}"


def _content(record: Record) -> bytes:
    content = asdict(record)
    del content["number"]  # the file's name has it
    return json.dumps(content).encode()
