"""Damage to files, undone afterwards, files that cannot be read, and a tar of few bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def damaged(files: Sequence[Path], chance: random.Random) -> Iterator[str]:
    """Flips a bit of one of the files, or cuts it short, while the context lasts.

    Gives what was done.
    """
    file = chance.choice(files)
    content = file.read_bytes()
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    if chance.random() < 0.8:
        flipped = bytes([content[place] ^ 1 << bit])
        file.write_bytes(content[:place] + flipped + content[place + 1 :])
        done = f"bit {bit} of byte {place} of {file} flipped"
    else:
        file.write_bytes(content[:place])
        done = f"{file} cut off at byte {place}"
    yield done
    file.write_bytes(content)


def sparse_tar(name: str, size: int) -> bytes:
    """A tar of 2 KiB with one sparse member that declares `size` zeros (GNU's old format)."""
    member = tarfile.TarInfo(name)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    number = b"\x80" + size.to_bytes(11, "big")
    header[386:410] = number + b"%011o\0" % 0  # one part with no bytes, at the end
    header[483:495] = number
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(3 * tarfile.BLOCKSIZE)


SECONDS = 5  # for one reading; a FIFO or /dev/zero takes for ever


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


KINDS: Sequence[Callable[[Path], None]] = (_fifo, _endless, _folder, _dangling)


def with_unreadable_files(folder: Path) -> Iterator[str]:
    """Replaces each file below a folder by each kind, and restores it; yields a description."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in files:
        kept = folder.parent / "kept"
        path.rename(kept)
        for make in KINDS:
            make(path)
            yield f"{path.relative_to(folder)} is a{make.__name__.replace('_', ' ')}"
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        kept.rename(path)


class TooLong(BaseException):
    """No OSError, which the code under test would explain."""


@contextmanager
def time_limit(what: str) -> Iterator[None]:
    """Raises a `TooLong` if the block takes longer than `SECONDS`."""

    def ring(_signal: int, _frame: object) -> None:
        raise TooLong(what)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
