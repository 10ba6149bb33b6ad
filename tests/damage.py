"""Random damage to files, undone afterwards, and a tar that is less than it declares."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator, Sequence
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
