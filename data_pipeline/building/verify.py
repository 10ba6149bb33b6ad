"""`samestep data verify`: compares every byte of a dataset with its manifest."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.building.progress import Meter
from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.reading.remote import fetch_tokenizer, load_manifest
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer import storage
from trainer.errors import DataError


def verify(location: str | Path) -> list[str]:
    """Reads every byte of a dataset and returns a sentence for each problem.

    Args:
        location: its folder or address.

    Raises:
        DataError: there is no manifest to compare with.
    """
    location = str(location)
    manifest = load_manifest(location)
    total = sum(shard.bytes for shard in manifest.shards)
    problems = _tokenizer_problems(location, manifest)
    # Threads are enough: hashing and reading release the interpreter lock.
    with Meter("verifying") as meter, ThreadPoolExecutor() as threads:
        found = threads.map(partial(_problem, location), manifest.shards)
        for shard, problem in zip(manifest.shards, found, strict=True):
            meter.advance(shard.bytes / total, shard.bytes, shard.documents)
            if problem:
                problems.append(f"{shard.name}: {problem}")
    return problems


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


def _problem(location: str, shard: ShardInfo) -> str | None:
    path = f"{location}/{shard.name}"
    try:
        with storage.open(path) if storage.is_url(path) else open(path, "rb") as file:
            # The size first: a truncated shard needs no reading.
            size = file.seek(0, io.SEEK_END)
            if size != shard.bytes:
                return f"{size} bytes instead of {shard.bytes}"
            file.seek(0)
            same = hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
            return None if same else "its bytes have changed (SHA-256 differs)"
    except (OSError, DataError) as error:
        return str(error)
