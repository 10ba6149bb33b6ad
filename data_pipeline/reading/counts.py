"""Caches the number of examples of each shard beside the dataset, for the next start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.packing.plan import Int64
from trainer.errors import DataError
from trainer.storage import atomic_write

logger = logging.getLogger(__name__)


def cached_counts(file: Path, shards: int, count: Callable[[], Int64]) -> Int64:
    """Reads the counts from a file, or calls `count` and writes the result: int64 [shards].

    The file is only a cache: it may be missing, damaged or unwritable, and several processes may
    write it.
    """
    # SHA-256 of the content, then one little-endian int64 for each shard.
    try:
        stored = file.read_bytes()
    except OSError:
        stored = b""
    checksum, content = stored[:32], stored[32:]
    if len(content) == 8 * shards and hashlib.sha256(content).digest() == checksum:
        return np.frombuffer(content, dtype="<i8").astype(np.int64)
    counts = count()
    content = counts.astype("<i8").tobytes()
    try:
        with atomic_write(file) as out:
            out.write(hashlib.sha256(content).digest() + content)
    except (DataError, OSError) as error:
        logger.debug("cannot cache example counts: %s", error)
    return counts
