"""New files of JSON Lines, which appear under their names once they are whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from trainer.errors import ConfigError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ROWS = 2048  # that are compressed together


def check_new(path: Path, option: str) -> None:
    """Refuses a name that no file of JSON Lines can have, or that one has.

    Args:
        path: the name.
        option: that it was given with, such as "--output".

    Raises:
        ConfigError: saying what to name instead.
    """
    if not path.name.endswith(_SUFFIXES):
        raise ConfigError(
            f"{option} {path} is written as JSON Lines; let its name end in {' or '.join(_SUFFIXES)}"
        )
    if path.exists():
        raise ConfigError(
            f"{path} is there already, whole; name another file with {option}, or remove it"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: there is no folder {path.parent}; make it, or name another file"
        )


def line(row: Mapping[str, object]) -> str:
    """A row as a line, with its end."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def compressed(lines: bytes, name: str) -> bytes:
    """Lines as the file of this name has them. Each piece is compressed by itself, which readers take as one file."""
    if name.endswith(".gz"):
        return gzip.compress(lines, mtime=0)
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor().compress(lines)
    return lines


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes a whole file.

    Raises:
        StorageError: the folder or the disk does not take it.
    """
    from trainer.storage import atomic_write  # which takes longer to import than a command's --help

    lines = map(line, rows)
    with atomic_write(path) as file:
        while piece := "".join(islice(lines, _ROWS)):
            file.write(compressed(piece.encode(), path.name))
