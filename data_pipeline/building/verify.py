"""`samestep data verify`: compares every byte of a dataset with its manifest."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_pipeline.building.progress import Meter
from data_pipeline.format.manifest import MANIFEST, MOST_BYTES, Manifest
from data_pipeline.reading.counts import parse_counts
from data_pipeline.reading.dataset import load_manifest
from data_pipeline.reading.remote import fetch_tokenizer
from data_pipeline.tokenizers.settings import SAVED_FILES
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep import storage
from samestep.errors import DataError, StorageError
from samestep.storage import Digest, objects
from samestep.stored_json import parse_json
from samestep.untrusted import open_regular, read_regular

SMALL_FILES = (
    *(f"tokenizer/{name}" for name in SAVED_FILES),
    "rejected.jsonl",
    "duplicates.jsonl",
)
"""Files that a build may write, except for shards and the cache."""


def small_files(folder: Path) -> dict[str, Digest]:
    """Hashes all files but the shards and the cache, for the manifest."""
    digests = {}
    for name in SMALL_FILES:
        if (folder / name).exists():
            with open_regular(folder / name) as file:
                digests[name] = Digest.of(file)
    return digests


def verify(location: str | Path) -> list[str]:
    """Reads every byte of a dataset and returns a sentence for each problem.

    Args:
        location: its folder or address.

    Raises:
        DataError: there is no manifest to compare with.
    """
    location = str(location)
    manifest = load_manifest(location)
    shards = manifest.shards
    total = sum(shard.bytes for shard in shards)
    # Threads are enough: hashing and reading release the interpreter lock.
    with Meter("verifying") as meter, ThreadPoolExecutor() as threads:
        # All are submitted before the first result is read, and the large ones last.
        cached = threads.map(partial(_cache_problem, location), _cached(location))
        digests = manifest.small_files or {}
        small = threads.map(partial(_problem, location), digests.keys(), digests.values())
        large = threads.map(lambda shard: _problem(location, shard.name, shard.digest), shards)
        problems = _manifest_problems(location)
        problems += filter(None, small)
        # A changed file explains another fingerprint already.
        if not any(problem.startswith("tokenizer/") for problem in problems):
            problems += _tokenizer_problems(location, manifest)
        problems += filter(None, cached)
        for shard, problem in zip(shards, large, strict=True):
            meter.advance(shard.bytes / total, shard.bytes, shard.documents)
            if problem:
                problems.append(problem)
    return problems


def unsealed(location: str) -> list[str]:
    """Returns a sentence for each file of a dataset that its manifest has no hash of.

    Args:
        location: its folder or address; some addresses cannot be listed.
    """
    manifest = load_manifest(location)
    known = {MANIFEST, *(shard.name for shard in manifest.shards), *(manifest.small_files or ())}
    sentences = []
    for name in sorted({*_names(location)}.difference(known)):
        reason = "the manifest does not name it"
        if manifest.small_files is None and name in SMALL_FILES:
            reason = "its bytes are not compared, since an earlier version has built the dataset"
        sentences.append(f"{name}: {reason}")
    return sentences


def _names(location: str) -> Iterator[str]:
    """Yields the names of all files outside the cache."""
    if not storage.is_url(location):
        folder = Path(location)
        for path in folder.rglob("*"):
            name = path.relative_to(folder)
            if path.is_file() and name.parts[0] != ".cache":
                yield name.as_posix()
    elif storage.is_writable(location):
        with suppress(StorageError):  # some may read files, but not list them
            yield from objects.sizes(location)
            yield from (f"tokenizer/{name}" for name in objects.sizes(f"{location}/tokenizer"))


def _manifest_problems(location: str) -> list[str]:
    """Compares the bytes of a manifest with those that a build writes for its content."""
    content = _read(location, MANIFEST)
    tree = parse_json(content, dict[str, Any], MOST_BYTES)
    written = json.dumps(tree, indent=1, sort_keys=True) + "\n"
    is_same = "checksum" not in tree or content == written.encode()
    return [] if is_same else [f"{MANIFEST}: its bytes have changed"]


def _cached(location: str) -> list[str]:
    """Names of the files with counts of examples."""
    names: list[str] = []
    if not storage.is_url(location):
        names = [path.name for path in Path(location).glob(".cache/*")]
    elif storage.is_writable(location):
        with suppress(StorageError):
            names = objects.names(f"{location}/.cache")
    return [f".cache/{name}" for name in sorted(names) if name.endswith(".counts")]


def _cache_problem(location: str, name: str) -> str | None:
    """Compares counts of examples with the hash that they begin with."""
    try:
        parse_counts(_read(location, name))
    except (OSError, ValueError, DataError) as error:
        return f"{name}: {error}. It may be deleted"
    return None


def _read(location: str, name: str) -> bytes:
    path = f"{location}/{name}"
    return objects.read(path) if storage.is_url(path) else read_regular(Path(path))


def _tokenizer_problems(location: str, manifest: Manifest) -> list[str]:
    try:
        with TemporaryDirectory() as copy:
            folder = Path(location)
            if storage.is_url(location):
                folder = Path(copy)
                fetch_tokenizer(location, folder)
            fingerprint = Tokenizer.load(folder / "tokenizer", saved=True).fingerprint
    except DataError as error:
        return [f"tokenizer: {error}"]
    same = fingerprint == manifest.tokenizer_fingerprint
    return [] if same else ["tokenizer: it is not the one that made the tokens"]


def _problem(location: str, name: str, expected: Digest) -> str | None:
    path = f"{location}/{name}"
    try:
        with objects.open(path) if storage.is_url(path) else open_regular(Path(path)) as file:
            # The size first: a truncated file needs no reading.
            size = file.seek(0, io.SEEK_END)
            if size != expected.bytes:
                return f"{name}: {size} bytes instead of {expected.bytes}"
            file.seek(0)
            return (
                None
                if Digest.of(file) == expected
                else f"{name}: its bytes have changed (SHA-256 differs)"
            )
    except (OSError, DataError) as error:
        return f"{name}: {error}"
