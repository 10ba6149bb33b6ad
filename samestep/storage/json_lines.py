"""New JSON Lines files, which appear under their names once they are complete."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from samestep.errors import ConfigError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ROWS = 2048  # per compressed block


def check_new(path: Path, option: str) -> None:
    """Rejects a path that exists, or that cannot name a JSON Lines file.

    Args:
        option: the command-line option that names the path, such as "--output".

    Raises:
        ConfigError: the message says which name to give instead.
    """
    if not path.name.endswith(_SUFFIXES):
        raise ConfigError(
            f"{option} {path} is written as JSON Lines. Use a name that ends in "
            f"{' or '.join(_SUFFIXES)}."
        )
    if path.exists():
        raise ConfigError(
            f"{option} {path} exists already and is complete. Name another file, or remove it."
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: the folder {path.parent} does not exist. Create it, or name another "
            "file."
        )


def line(row: Mapping[str, object]) -> str:
    """A row as a line of JSON, with its line break, which can be encoded as UTF-8."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        text = json.dumps(row)
    return text + "\n"


def compressed(lines: bytes, name: str) -> bytes:
    """Compresses lines as the suffix of `name` says.

    Each call makes a block of its own; readers of gzip and zstd take a sequence of blocks as one
    file, so blocks can be appended.
    """
    if name.endswith(".gz"):
        return gzip.compress(lines, mtime=0)
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(lines)
    return lines


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes a complete file.

    Raises:
        StorageError: the folder or the disk rejects it.
    """
    from samestep.storage import atomic_write  # takes longer to import than a command's --help

    lines = map(line, rows)
    with atomic_write(path) as file:
        while block := "".join(islice(lines, _ROWS)):
            file.write(compressed(block.encode(), path.name))
