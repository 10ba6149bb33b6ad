"""Hashes of jobs' inputs: a job runs again if its data or its first weights have changed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.format.manifest import MANIFEST
from data_pipeline.reading.cache import default_folder
from data_pipeline.sources import SourceConfig
from samestep.config import Kinds, Tree, decode, to_tree
from samestep.config.tree import merge
from samestep.errors import StorageError
from samestep.storage.local import write_text
from trainer.training.weights.loading import load_weights

_SOURCE = Annotated[SourceConfig, Kinds("data_pipeline.sources.kinds")]

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
    """Returns a stamp for each file of the sources in a dataset's recipe or a task's file."""
    source: Any = recipe.get("source")
    further = [merge(source, changes) for changes in (recipe.get("also") or {}).values() if changes]
    return [each for tree in (source, *further) for each in _stamps_of_source(tree)]


def _stamps_of_source(tree: object) -> list[Stamp]:
    source: SourceConfig = decode(_SOURCE, tree, "source")
    settings = to_tree(source)
    paths = [*(settings.get("paths") or ()), *(settings.get("heldout") or ())]
    if paths and all("://" in path for path in paths):
        return []  # the settings have the addresses, and listing their files takes requests
    return stamps(source)


def stamps_of_experiment(settings: Tree) -> list[Stamp]:
    """Returns the stamps of the datasets, vectors and weights in settings of `samestep train`.

    The settings may have any form; they are checked later.
    """
    weights, folders = [settings.get("init_from")], [settings.get("init_embeddings")]
    match settings.get("data"):
        case {"sources": [*sources]}:
            folders += [each.get("path") for each in sources if isinstance(each, dict)]
        case {"path": path}:
            folders.append(path)
    match settings.get("objective"):
        case {"teacher": teacher} | {"guide": {"path": teacher}}:
            weights.append(teacher)
    return stamps_of_folders(*folders) + stamps_of_weights(*weights)


def stamps_of_weights(*paths: str | None) -> list[Stamp]:
    """Returns a stamp for each folder of a run or checkpoint that no stage makes."""
    return [[path, _identity(path)] for path in paths if path and Path(path).is_dir()]


def stamps_of_folders(*paths: str | None) -> list[Stamp]:
    """Returns the stamps of datasets, tokenizers and vectors that no stage makes."""
    return [each for path in paths if path and Path(path).is_dir() for each in _files(Path(path))]


@cache
def _identity(path: str) -> str:
    return load_weights(path).identity()


@cache
def _files(folder: Path) -> list[Stamp]:
    manifest = folder / MANIFEST  # of a dataset, with the checksums of its shards
    files = [manifest] if manifest.is_file() else sorted(filter(Path.is_file, folder.iterdir()))
    return [stamp(file) for file in files]


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
