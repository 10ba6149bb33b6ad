"""New local folders, which are complete under their own name, or not there."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.storage.flock import LOCK_EX, LOCK_NB, flock
from samestep.storage.local import sync_folder, temporary_name

logger = logging.getLogger(__name__)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, renamed to `path` when the block ends without an error.

    Those that killed processes have left for the same path are removed.

    Args:
        path: must not exist, or be empty.

    Raises:
        OSError: the disk rejects the folder, or another process has made it meanwhile.
    """
    _remove_abandoned(path)
    temporary = temporary_name(path)
    descriptor = None
    try:
        # Another process may take it for abandoned, and remove it, until it is locked.
        while descriptor is None or not temporary.exists():
            if descriptor is not None:
                os.close(descriptor)
            temporary.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                flock(descriptor, LOCK_EX)
        yield temporary
        # The rename must not become durable before the content, or a power cut leaves empty files.
        for file in filter(Path.is_file, temporary.rglob("*")):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Removes the temporary folders of a path that no process has locked, or else names them."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}\.tmp")
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    for folder in [each for each in siblings if name.fullmatch(each.name)]:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a file of `atomic_write`, or gone meanwhile
            continue
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            shutil.rmtree(folder)
            logger.info("removed %s, which a command that was stopped has left", folder)
        except BlockingIOError:  # another process fills it
            pass
        except OSError as error:
            text = "%s may be left by a command that was stopped (%s); remove it if none is running"
            logger.warning(text, folder, error.strerror)
        finally:
            os.close(descriptor)
