"""Readers hold the checkpoint that they read, so that retention does not remove it meanwhile.

On a file system a reader has a shared `flock` on the step's `COMMITTED`; it ends with the process.
In an object store it has a note, `.reading-ID` beside the steps, which names the step's folder and
is renewed every few seconds. A note that does not change between two looks, far enough apart, is
of a reader that was killed; this compares no clocks of different machines. A reader that may not
write in the store, or a file system without locks, has no hold, and takes its chances as before.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from samestep.errors import CheckpointError
from samestep.storage import flock
from samestep.untrusted import open_regular
from trainer.checkpoint import files, integrity
from trainer.checkpoint.files import Location

logger = logging.getLogger(__name__)

_NOTE = ".reading-"
_RENEW_SECONDS = 20.0
_STALE_SECONDS = 120.0  # without a renewal; retries in a store may take a while
_LEAVE_SECONDS = 5.0  # a store that does not answer keeps no command from its end
_TRIES, _TRY_SECONDS = 5, 0.1  # for a lock that a removal has for a moment


class Hold:
    """A reader's hold on the folder of a step, until the object is gone or the process ends."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.release: weakref.finalize[..., Any]
        if isinstance(folder, Path):
            files_open = ExitStack()
            try:
                file = files_open.enter_context(open_regular(folder / integrity.COMMITTED))
                _lock_shared(file)
            except OSError as error:  # it is gone, or is being removed, or there are no locks
                logger.debug("%s is not held: %s", folder, error)
            self.release = weakref.finalize(self, files_open.close)
            return
        note, released = folder.parent / f"{_NOTE}{uuid.uuid4().hex}", threading.Event()
        self.release = weakref.finalize(self, _leave, note, released)
        self.release.atexit = False  # the note becomes stale by itself
        if _write(note, folder.name):
            arguments = (note, folder.name, released)
            threading.Thread(target=_renew, args=arguments, name="hold", daemon=True).start()
        else:
            self.release.detach()


def _write(note: Location, name: str) -> bool:
    values = {"folder": name, "host": platform.node(), "renewed": time.time()}
    try:
        files.write(note, files.seal(values))
    except CheckpointError as error:  # most likely, this process may only read
        logger.debug("%s is not held: %s", name, error)
        return False
    return True


def _renew(note: Location, name: str, released: threading.Event) -> None:
    while not released.wait(_RENEW_SECONDS):
        _write(note, name)


def _lock_shared(file: IO[bytes]) -> None:
    for left in reversed(range(_TRIES)):
        try:
            flock.flock(file, flock.LOCK_SH | flock.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_TRY_SECONDS)


def _leave(note: Location, released: threading.Event) -> None:
    released.set()
    thread = threading.Thread(target=_remove, args=(note,), daemon=True)
    thread.start()
    thread.join(_LEAVE_SECONDS)


def _remove(note: Location) -> None:
    try:
        files.remove(note)
    except CheckpointError as error:
        logger.debug("%s was not removed: %s", note, error)


class Holds:
    """The holds of readers on the steps in a folder, as a process sees them that removes steps."""

    def __init__(self, root: Location) -> None:
        self._root = root
        # Content of each note, and when it was first seen with that content.
        self._seen: dict[str, tuple[bytes, float]] = {}

    def held(self, certain: bool = False) -> set[str]:
        """Returns the names of the folders that readers hold by notes; removes stale notes.

        Args:
            certain: if there are notes, wait until killed readers' notes have become stale.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        if isinstance(self._root, Path):
            return set()
        if certain and self.held():
            logger.info("waiting for %g s to see which readers are alive", _STALE_SECONDS)
            time.sleep(_STALE_SECONDS + 1)
        seen, held = {}, set()
        for name in files.names(self._root):
            if not name.startswith(_NOTE):
                continue
            content = files.read_if_there(self._root / name)
            if content is None:  # released meanwhile
                continue
            now = time.monotonic()
            former, since = self._seen.get(name, (None, now))
            since = since if former == content else now
            try:
                values = files.unseal(content)[0]
                folder = str(values["folder"])
            except (ValueError, TypeError, KeyError):
                folder = ""
            if now - since > _STALE_SECONDS:
                files.remove(self._root / name)
                continue
            seen[name] = (content, since)
            held.add(folder)
        self._seen = seen
        return held


@contextmanager
def unless_held(folder: Location, held: Collection[str] = ()) -> Iterator[bool]:
    """Yields whether no reader holds a step; none gets a lock on it within the context.

    Args:
        held: names of the folders that readers hold by notes, see `Holds`.
    """
    free, opened = folder.name not in held, ExitStack()
    if isinstance(folder, Path):
        try:
            file = opened.enter_context((folder / integrity.COMMITTED).open("rb+"))
            flock.flock(file, flock.LOCK_EX | flock.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:  # not committed, or there are no locks
            logger.debug("%s cannot be locked: %s", folder, error)
    try:
        yield free
    finally:
        with suppress(OSError):  # nothing was written
            opened.close()
