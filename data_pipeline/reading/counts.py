"""Keeps the number of examples of each shard beside the dataset, for the next start.

Builds write the counts of common packings, and the first start with another packing writes its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64
from samestep.errors import DataError
from samestep.storage import atomic_write
from samestep.untrusted import read_regular

logger = logging.getLogger(__name__)


def counts_name(dataset: str, split: str, packing: str, seed: int | None = None) -> str:
    """Name of the file with the counts of a split, relative to the dataset.

    Args:
        dataset: `Manifest.digest`.
        packing: `count_digest` of the packing.
        seed: of the run, if the counts depend on it.
    """
    # The name has every input of the counts, so a changed packing is counted anew.
    parts = [dataset, split, packing, *([] if seed is None else [str(seed)])]
    name = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
    return f".cache/{name}.counts"


def cached_counts(file: Path, shards: int, count: Callable[[], Int64]) -> Int64:
    """Reads the counts from a file, or calls `count` and writes the result: int64 [shards].

    The file is only a cache: it may be missing, damaged or unwritable, and several processes may
    write it.
    """
    counts = read_counts(file, shards)
    if counts is None:
        counts = count()
        write_counts(file, counts)
    return counts


def read_counts(file: Path, shards: int) -> Int64 | None:
    """Reads the counts of all shards: int64 [shards]; None if there are none, or damaged ones."""
    try:
        counts = parse_counts(read_regular(file))
    except (OSError, ValueError):
        return None
    return counts if len(counts) == shards else None


def parse_counts(stored: bytes) -> Int64:
    """Reads the content of a file with counts: int64 [shards].

    Raises:
        ValueError: it is damaged.
    """
    # SHA-256 of the content, then one little-endian int64 for each shard.
    checksum, content = stored[:32], stored[32:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError("its bytes have changed (SHA-256 differs)")
    return np.frombuffer(content, dtype="<i8").astype(np.int64)


def write_counts(file: Path, counts: npt.ArrayLike) -> None:
    """Writes the counts of all shards: int [shards]; a failure is only logged."""
    content = np.asarray(counts, dtype="<i8").tobytes()
    try:
        with atomic_write(file) as out:
            out.write(hashlib.sha256(content).digest() + content)
    except (DataError, OSError) as error:
        logger.debug("cannot cache example counts: %s", error)
