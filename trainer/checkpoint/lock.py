"""One training at a time in a folder; a second one fails with an error that names the first.

The owner writes a note, `.owner`, renews it every few seconds, and removes it at the end. If the
process is killed, the note stays. A note that is not renewed for a while has no owner any more;
this compares no clocks of different machines, only whether the note changes while it is watched.

An owner that was only frozen may wake up after another process has taken over. What it then still
writes does no harm, because each owner also has a lease, with a higher number than all before it
(`trainer.checkpoint.lease`); within seconds it finds the higher number and ends.

On a file system the owner also holds an `flock` on `.lock`. It ends with the process, so on the
same machine it tells at once whether the owner is alive. It is not enough alone: the locks of a
network file system may be invisible to other machines, or missing, and object stores have none.
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from samestep.errors import EXIT_CRASHED, CheckpointError, ConfigError, fix_of
from samestep.storage import flock
from samestep.stored_json import Seconds, checked
from trainer.checkpoint import files, history
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease

logger = logging.getLogger(__name__)

GROUP = "SAMESTEP_GROUP"
"""Environment variable of the workers of an elastic run on several machines, see `Group`."""

_NOTE = ".owner"
_LOCK = ".lock"
_WAIT_SECONDS = 10.0  # killed processes may take that long to end
_RENEW_SECONDS = 10.0
_STALE_SECONDS = 35.0  # without a renewal; retries in a store take up to 31
_UNKNOWN = 0  # process of a damaged note
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Group:
    """The machines that an elastic run has at a time.

    Attributes:
        run: a secret of the run, the same for all of its groups.
        order: numbers of the host and of its round. A group with higher ones is later, and the host
            has found the earlier one lost.
    """

    run: str
    order: tuple[int, int]

    @classmethod
    def parse(cls, text: str) -> Group | None:
        """Reads the environment variable; None if it is empty."""
        if not text:
            return None
        run, host, number = text.split()
        return cls(run, (int(host), int(number)))

    def __str__(self) -> str:
        return f"{self.run} {self.order[0]} {self.order[1]}"

    def follows(self, other: Group | None) -> bool:
        """Whether it is a later group of the same run."""
        return other is not None and other.run == self.run and other.order < self.order


@dataclass(frozen=True)
class Owner:
    """The content of a note.

    Attributes:
        token: unique for each start; process numbers are reused.
        host: name of the machine.
        machine: running system and container, in which `pid` is unique; see `_machine`.
        job: the scheduler's number, if any.
        since: start of the process, in seconds since 1970.
        renewed: when the note was last written, in seconds since 1970.
        lease: number of its lease; 0 in notes of older versions.
        group: of an elastic run, as text; "" if it is not one on several machines.
    """

    token: str
    host: str
    machine: str
    pid: int
    user: str
    job: str | None
    since: Seconds
    renewed: Seconds
    lease: int = 0
    group: str = ""

    @classmethod
    def this_process(cls) -> Owner:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may have no name for the user
            user = f"user {os.getuid()}"
        job = next((os.environ[name] for name in _JOBS if name in os.environ), None)
        now = time.time()
        token, group = uuid.uuid4().hex, os.environ.get(GROUP, "")
        return cls(
            token,
            platform.node(),
            _machine(),
            os.getpid(),
            user,
            job,
            now,
            now,
            group=group,
        )

    @classmethod
    def parse(cls, content: bytes) -> Owner:
        """Reads a note. Another version may have written it: keys without a field are ignored.

        Of a damaged note, the token tells whether it changes.
        """
        try:
            found, _ = files.unseal(content)
            return checked(found, cls)
        except ValueError:
            token = hashlib.sha256(content).hexdigest()
            return cls(token, "", "", _UNKNOWN, "", None, 0.0, 0.0, lease=sys.maxsize)

    def __str__(self) -> str:
        if self.pid == _UNKNOWN:
            return f"its note, {_NOTE}, is damaged, so who it is and whether it is alive is unknown"
        job = "" if self.job is None else f", job {self.job}"
        age, silence = (
            timedelta(seconds=max(0, round(time.time() - moment)))  # clocks of machines differ
            for moment in (self.since, self.renewed)
        )
        return (
            f"{self.user} on {self.host}, process {self.pid}{job}, for {age} "
            f"(last sign of life {silence} ago)"
        )

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that no longer exists."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)  # signal 0 only asks whether the process exists
        except ProcessLookupError:
            return True
        except PermissionError:  # it exists, and belongs to another user
            return False
        # This process has the same number as the owner before a restart of the container.
        return self.pid == os.getpid()


class Lock:
    """The owner's note in a folder, renewed by a thread; see `only_writer`."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._note = folder / _NOTE
        self._me = Owner.this_process()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._lease: Lease | None = None

    def owner(self) -> Owner | None:
        """Reads the note; None if there is none.

        Raises:
            CheckpointError: it cannot be read, so there may or may not be an owner.
        """
        content = files.read_if_there(self._note)
        return None if content is None else Owner.parse(content)

    def follows(self, former: Owner | None) -> bool:
        """Whether this process belongs to a later group of the former owner's elastic run."""
        mine = Group.parse(self._me.group)
        return former is not None and mine is not None and mine.follows(Group.parse(former.group))

    def take(self, alone: bool) -> Lease:
        """Takes a lease and writes the note, once the former owner is known to be gone.

        Args:
            alone: this process holds the `flock`, so no other of this machine is the owner.

        Raises:
            ConfigError: the former owner is alive, or another process takes over at this moment.
            CheckpointError: the note cannot be read or written.
        """
        former = self.owner()
        if former is not None:
            newest = max(history.lease_numbers(files.names(self.folder)), default=0)
            # A dead process of this machine needs no waiting. Elsewhere only silence can tell, and
            # the note of a former owner, written late, says nothing about the newest one.
            is_dead = former.is_dead or (alone and former.is_here)
            if self.follows(former):
                logger.info("the machines of this run before this round are given up: %s", former)
            elif former.lease < newest or not is_dead:
                self._watch(former, newest)
        self._lease = Lease.take(self.folder)
        if self._lease is None:
            raise _refused(self.folder, self.owner())
        self._me = replace(self._me, lease=self._lease.number)
        self._write()
        self._thread.start()
        return self._lease

    def release(self) -> None:
        """Removes the note."""
        self._released.set()
        self._thread.join()  # or it could write the note again
        with suppress(CheckpointError):
            owner = self.owner()
            if owner is not None and owner.token == self._me.token:
                files.remove(self._note)

    def _watch(self, former: Owner, newest: int) -> None:
        """Returns once the newest owner has not renewed its note for long enough.

        Raises:
            ConfigError: it was renewed.
        """
        logger.info("waiting to see if another training is alive in %s: %s", self.folder, former)
        deadline = time.monotonic() + _STALE_SECONDS
        looked = 0.0
        while looked < deadline:
            time.sleep(min(1.0, _STALE_SECONDS / 10))
            # Time before the look: a pause of this process after it must not count as silence.
            looked = time.monotonic()
            found = self.owner()
            if found is None:
                return
            # `renewed` is part of the note, so any renewal makes it differ. That of a lower lease
            # is the note of an owner that was frozen, and ends soon.
            if found != former and found.lease >= newest:
                raise _refused(self.folder, found)
            former = found
        logger.warning(
            "taking %s over from a training that gives no sign of life: %s", self.folder, former
        )

    def _renew(self) -> None:
        assert self._lease is not None, "the lease is taken before the thread starts"
        while not self._released.wait(_RENEW_SECONDS):
            try:
                self._lease.check_or_end()
                self._write()
            except Exception as error:  # a full disk or an unreachable store may recover
                logger.debug("not renewed: %s", error)

    def _write(self) -> None:
        files.write(self._note, files.seal({**asdict(self._me), "renewed": time.time()}))


@contextmanager
def only_writer(folder: Location, needed_by: str | None = None) -> Iterator[Lease]:
    """Owns a folder, which is created if missing, while the context lasts; yields the lease.

    Args:
        needed_by: the setting that names the folder and its value, as "output=runs/a", for the
            error.

    Raises:
        CheckpointError: this process cannot write in the folder.
        ConfigError: another training owns it, and does not end within some seconds.
    """
    try:
        files.make_folder(folder)
    except CheckpointError as error:
        if needed_by is None or not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(
            f"cannot write in {folder}, which {needed_by} needs: {error.__cause__.strerror}; "
            f"{fix_of(error.__cause__, 'make its folder writable')}, "
            f"or choose another {needed_by.partition('=')[0]}"
        ) from error
    lock = Lock(folder)
    with ExitStack() as stack:
        # The flock is released by the system when the process ends, even by SIGKILL.
        alone = isinstance(folder, Path) and stack.enter_context(_flocked(folder / _LOCK, lock))
        lease = lock.take(alone)
        stack.callback(lock.release)
        yield lease


def _machine() -> str:
    """Identifies the running system and the container, in which process numbers are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def _refused(folder: Location, owner: Owner | None) -> ConfigError:
    who = "" if owner is None else f": {owner}"
    error = ConfigError(
        f"another training is running in {folder}{who}. "
        "Wait for it to end or stop it, or choose another folder"
    )
    if os.environ.get(GROUP):
        # Most likely, other machines of this run, which do not know yet that these continue.
        error.exit_code = EXIT_CRASHED
    return error


@contextmanager
def _flocked(path: Path, lock: Lock) -> Iterator[bool]:
    """Holds the system's lock on a file; yields False if the file system has no locks."""
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        opened = flock.open_lock(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be locked: {error.strerror}; {fix_of(error, 'remove it')}, "
            "or choose another folder"
        ) from error
    with opened as file:
        while True:
            try:
                flock.flock(file, flock.LOCK_EX | flock.LOCK_NB)
                locked = True
                break
            except BlockingIOError:
                if lock.follows(lock.owner()):  # it is frozen, and its lease protects us
                    locked = False
                    break
                if time.monotonic() > deadline:
                    raise _refused(lock.folder, lock.owner()) from None
                time.sleep(0.2)
            except OSError as error:
                logger.debug("%s cannot be locked: %s", path, error)
                locked = False
                break
        yield locked
