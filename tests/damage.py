"""Random damage to files, undone afterwards."""

from __future__ import annotations

import random
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
