"""Hashes of source files: a job runs again if its data has changed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated

from data_pipeline.reading.cache import default_folder
from data_pipeline.sources import SourceConfig
from trainer.config import Kinds, Tree, decode, to_tree
from trainer.errors import StorageError
from trainer.storage.local import write_text

_SOURCE = Annotated[SourceConfig, Kinds("data_pipeline.sources")]

_LARGE = 64 * 2**20
"""Bytes of a file whose hash is worth keeping: about a tenth of a second of reading."""

Stamp = list[str]
"""Name and SHA-256 of a file; of an address, only its name."""


def stamps(source: SourceConfig) -> list[Stamp]:
    """Returns a stamp for each file of a source. Copies of the files have the same stamps."""
    files = [Path(file) for file in source.build().files]
    hub = to_tree(source).get("dataset")
    if hub and Path(hub["path"]).is_dir():  # a local copy of a dataset of the Hub
        files += sorted(Path(hub["path"]).rglob("*"))
    return [stamp(file) for file in files]


def stamps_of(recipe: Tree) -> list[Stamp]:
    """Returns a stamp for each file of the source in a dataset's recipe or a task's file."""
    source: SourceConfig = decode(_SOURCE, recipe.get("source"), "source")
    tree = to_tree(source)
    paths = [*(tree.get("paths") or ()), *(tree.get("heldout") or ())]
    if paths and all("://" in path for path in paths):
        return []  # the settings have the addresses, and listing their files takes requests
    return stamps(source)


def stamp(file: Path) -> Stamp:
    """The stamp of a file."""
    if not file.is_file():
        return [str(file)]
    stat = file.stat()
    return [file.name, _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)]


@cache
def _sha256(file: Path, size: int, changed: int) -> str:
    if size < _LARGE:
        return _read(file)
    key = hashlib.sha256(f"{file} {size} {changed}".encode()).hexdigest()
    known = default_folder() / "digests" / key
    with suppress(OSError):
        return known.read_text()
    digest = _read(file)
    with suppress(StorageError):  # without a cache it is read again at the next start
        write_text(known, digest)
    return digest


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
