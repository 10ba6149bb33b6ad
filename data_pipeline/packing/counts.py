"""How many examples each shard has: counted once for each packing, and kept with the dataset for the next start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.packing.plans import Int64
from trainer.errors import DataError
from trainer.storage import atomic_write

logger = logging.getLogger(__name__)


def cached_counts(file: Path, shards: int, count: Callable[[], Int64]) -> Int64:
    """The counts in a file, or those that `count` returns, which are then written there.

    The file is a convenience: it may be absent, damaged, unwritable or written by several processes at once.

    Args:
        file: that of the dataset and the packing.
        shards: length of the result.
        count: counts the examples of all shards.

    Returns:
        int64 [shards].
    """
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
        logger.debug("example counts are not kept: %s", error)
    return counts
