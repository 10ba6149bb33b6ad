"""One training at a time in a folder: who comes second is told who was first.

The owner leaves a note, `.owner`, and renews it every few seconds; removed in the end, it stays
behind when the process is killed. A note that is not renewed for a while belongs to nobody,
whatever the clocks of the machines say. In a folder, an `flock` on `.lock` tells at once on the
machine itself, where network file systems may have locks that others do not see, or none. Object
stores have no locks at all.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from trainer.checkpoint import files
from trainer.checkpoint.files import Location, Url
from trainer.errors import CheckpointError, ConfigError, ObjectNotFoundError

logger = logging.getLogger(__name__)

_NOTE = ".owner"
_LOCK = ".lock"
_WAIT_SECONDS = 10.0  # killed processes may take that long to end
_RENEW_SECONDS = 10.0
_STALE_SECONDS = 35.0  # without a renewal; trying again in a store takes up to 31
_RACE_SECONDS = 1.0  # in which of two that start at once the later note replaces the other
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Owner:
    """What the note says.

    Attributes:
        token: of this one time, as process numbers come again.
        host: the machine.
        machine: which of those of that name, or which container there: where `pid` counts.
        pid: the process.
        user: whose it is.
        job: the scheduler's number of it, if any.
        since: when it began, in seconds since 1970.
        renewed: when the note was last written.
    """

    token: str
    host: str
    machine: str
    pid: int
    user: str
    job: str | None
    since: float
    renewed: float

    @classmethod
    def this_process(cls) -> Owner:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # containers may not know it by name
            user = f"user {os.getuid()}"
        job = next((os.environ[name] for name in _JOBS if name in os.environ), None)
        now = time.time()
        return cls(uuid.uuid4().hex, platform.node(), _machine(), os.getpid(), user, job, now, now)

    def __str__(self) -> str:
        job = "" if self.job is None else f", job {self.job}"
        age, silence = (
            timedelta(seconds=round(time.time() - moment)) for moment in (self.since, self.renewed)
        )
        return f"{self.user} on {self.host}, process {self.pid}{job}, for {age} (last sign of life {silence} ago)"

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine, and is no more."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            return False
        return self.pid == os.getpid()


class Lock:
    """The owner's note in a folder, renewed by a thread; see `only_writer`."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._note = folder / _NOTE
        self._me = Owner.this_process()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    def check(self) -> None:
        """Makes sure that nobody has taken the folder over while this process was stopped or cut
        off.

        Raises:
            ConfigError: somebody has.
        """
        owner = self.owner()
        if owner is not None and owner.token != self._me.token:
            raise ConfigError(
                f"another training has taken {self.folder} over, as this one gave no sign of life: "
                f"{owner}; "
                "this one ends, so that their files do not mix: to go on with it, stop the other "
                "and start it again"
            )

    def owner(self) -> Owner | None:
        """Who the note says it is; None if there is none.

        Raises:
            CheckpointError: it cannot be read, which says nothing about whether there is one.
        """
        try:
            return Owner(**json.loads(files.read(self._note)))
        except CheckpointError as error:
            if isinstance(error, ObjectNotFoundError) or isinstance(
                error.__cause__, FileNotFoundError
            ):
                return None
            raise
        except (ValueError, TypeError):  # another version's
            return None

    def take(self, alone: bool) -> None:
        """Writes the note, once the former owner's is known to be nobody's.

        Args:
            alone: whether no other process of this machine can be the owner.

        Raises:
            ConfigError: the former owner is alive.
            CheckpointError: the note cannot be read or written.
        """
        former = self.owner()
        if former is not None and not former.is_dead and not (alone and former.is_here):
            self._watch(former)
        self._write()
        if isinstance(self.folder, Url):
            time.sleep(_RACE_SECONDS)
            self.check()
        self._thread.start()

    def release(self) -> None:
        """Removes the note."""
        self._released.set()
        self._thread.join()  # or it could write the note once more
        with suppress(CheckpointError):
            owner = self.owner()
            if owner is not None and owner.token == self._me.token:
                files.remove(self._note)

    def _watch(self, former: Owner) -> None:
        """Returns when a note has not been renewed for long enough."""
        logger.info(
            "waiting to see whether another training is alive in %s: %s", self.folder, former
        )
        deadline = time.monotonic() + _STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, _STALE_SECONDS / 10))
            found = self.owner()
            if found is None:
                return
            if found != former:
                raise _refused(self.folder, found)
        logger.warning(
            "taking %s over from a training that gives no sign of life: %s", self.folder, former
        )

    def _renew(self) -> None:
        while not self._released.wait(_RENEW_SECONDS):
            try:
                self.check()
                self._write()
            except ConfigError as error:
                logger.error("error: %s", error)
                logging.shutdown()
                os._exit(
                    error.exit_code
                )  # whatever the other threads are at: it must not be written
            except CheckpointError as error:  # a full disk or a silent store, which passes
                logger.debug("not renewed: %s", error)

    def _write(self) -> None:
        files.write(self._note, json.dumps({**asdict(self._me), "renewed": time.time()}).encode())


@contextmanager
def only_writer(folder: Location) -> Iterator[None]:
    """Keeps others out of a folder while the context lasts; it makes the folder if need be.

    Raises:
        CheckpointError: the folder cannot be written in.
        ConfigError: another training writes in it, and has not ended within some seconds, as killed
            processes would.
    """
    files.make_folder(folder)
    lock = Lock(folder)
    with ExitStack() as stack:
        alone = isinstance(folder, Path) and stack.enter_context(_flocked(folder / _LOCK, lock))
        lock.take(alone)
        stack.callback(lock.release)
        yield


def _machine() -> str:
    """Tells running systems apart, and containers, whose process numbers are their own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return platform.node()


def _refused(folder: Location, owner: Owner | None) -> ConfigError:
    """What the second one hears."""
    who = "" if owner is None else f": {owner}"
    return ConfigError(
        f"another training is running in {folder}{who}; wait for it to end or stop it, or choose "
        "another folder"
    )


@contextmanager
def _flocked(path: Path, lock: Lock) -> Iterator[bool]:
    """Holds the system's lock on a file, which goes with this process, however that ends.

    False if it has none.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _refused(lock.folder, lock.owner()) from None
                time.sleep(0.2)
            except OSError as error:  # some network file systems have none
                logger.debug("%s cannot be locked: %s", path, error)
                yield False
                return
            else:
                yield True
                return
