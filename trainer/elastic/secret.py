"""The secret of a run, by which its agents and workers recognize each other."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from samestep.errors import ConfigError, ObjectNotFoundError, StorageError, fix_of
from samestep.storage import make_folder, sync_folder
from samestep.storage.channel import SECRET_BYTES
from trainer.checkpoint import files
from trainer.checkpoint.files import Location

logger = logging.getLogger(__name__)

ENVIRONMENT = "SAMESTEP_SECRET_FILE"
"""Environment variable with the name of a file that holds the secret."""
NAME = ".secret"
"""Name of the file in the folder of the run's checkpoints, if the variable is not set."""

_MOST_BYTES = 4096


def read(folder: Location, create: bool) -> bytes | None:
    """Reads the secret of a run.

    Args:
        folder: of the run's checkpoints, which all machines of the run share.
        create: whether to create a secret if there is none. Only the host of the rendezvous does.

    Returns:
        The secret; None if there is none yet.

    Raises:
        ConfigError: the file does not hold a secret.
        StorageError: the folder cannot be read or written.
    """
    if name := os.environ.get(ENVIRONMENT):
        return _named(Path(name))
    place = folder / NAME
    content = _stored(place)
    if content is None and create:
        _create(place)
        content = _stored(place)
    return None if content is None else _checked(content, str(place), "Remove it.")


def _named(path: Path) -> bytes:
    try:
        content, mode = path.read_bytes()[:_MOST_BYTES], path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"{ENVIRONMENT} is {path}, which cannot be read: {error.strerror}. Name a file with a "
            "secret."
        ) from error
    if mode & stat.S_IROTH:
        raise ConfigError(
            f"{ENVIRONMENT} is {path}, which every user can read. Change its mode to 600, and its "
            "content."
        )
    fix = f"Write one with: head -c {SECRET_BYTES} /dev/urandom | base64 > {path}"
    return _checked(content, f"{ENVIRONMENT} is {path}, which", fix)


def _checked(content: bytes, place: str, fix: str) -> bytes:
    # Whoever can watch a connection could guess a short secret at leisure.
    if len(content.strip()) < SECRET_BYTES:
        raise ConfigError(f"{place} holds no secret of at least {SECRET_BYTES} bytes. {fix}")
    return content.strip()


def _stored(place: Location) -> bytes | None:
    if not isinstance(place, Path):
        try:
            return files.read(place)
        except ObjectNotFoundError:
            return None
    try:
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                logger.warning(
                    "%s, the secret of the run, can be read by other users, who can take part in "
                    "the run. Change its mode to 600, or set %s to a file that has it",
                    place,
                    ENVIRONMENT,
                )
            return file.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"cannot read {place}: {error.strerror}; "
            f"{fix_of(error, 'remove it to get a new one')}, "
            f"or set {ENVIRONMENT} to a file with a secret"
        ) from error


def _create(place: Location) -> None:
    content = f"{secrets.token_hex(SECRET_BYTES)}\n".encode()
    if not isinstance(place, Path):
        files.write(place, content)
        return
    # The name appears with the whole content, and never with a mode that lets others read it.
    temporary = place.with_name(f"{NAME}.{secrets.token_hex(8)}")
    try:
        make_folder(place.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Sync before the rename, or a power cut may leave an empty file with this name.
            os.fsync(file.fileno())
        temporary.replace(place)
        sync_folder(place.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write {place}: {error.strerror}; {fix_of(error, 'make its folder writable')}, "
            f"or set {ENVIRONMENT} to a file with a secret"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
