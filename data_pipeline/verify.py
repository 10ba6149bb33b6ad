"""`samestep data verify`: whether a dataset is, byte for byte, what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from data_pipeline.manifest import Manifest, ShardInfo
from data_pipeline.progress import Meter
from data_pipeline.shards import file_sha256
from data_pipeline.tokenization import Tokenizer
from trainer.errors import DataError


def verify(folder: Path) -> list[str]:
    """Reads every byte of a dataset and returns what is wrong, a sentence each; an empty list is a whole dataset.

    Raises:
        DataError: there is no manifest to compare with.
    """
    manifest = Manifest.load(folder)
    total = sum(shard.bytes for shard in manifest.shards)
    problems = list(_tokenizer_problems(folder, manifest))
    # Threads are enough: hashing and reading release the interpreter lock.
    with Meter("verifying") as meter, ThreadPoolExecutor() as threads:
        found = threads.map(partial(_problem, folder), manifest.shards)
        for shard, problem in zip(manifest.shards, found, strict=True):
            meter.advance(shard.bytes / total, shard.bytes, shard.documents)
            if problem:
                problems.append(f"{shard.name}: {problem}")
    return problems


def _tokenizer_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        if Tokenizer.load(folder / "tokenizer").fingerprint != manifest.tokenizer_fingerprint:
            yield "tokenizer: not the one that made the tokens"
    except DataError as error:
        yield f"tokenizer: {error}"


def _problem(folder: Path, shard: ShardInfo) -> str | None:
    path = folder / shard.name
    try:
        if path.stat().st_size != shard.bytes:
            return f"{path.stat().st_size} bytes instead of {shard.bytes}"
        return None if file_sha256(path) == shard.sha256 else "its bytes have changed (SHA-256 differs)"
    except OSError as error:
        return error.strerror or str(error)
