"""Downloads shards in advance."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from data_pipeline.format.manifest import ShardInfo
from data_pipeline.packing import Int64
from data_pipeline.reading.remote import RemoteDataset
from samestep.environment import number
from samestep.errors import ConfigError
from samestep.storage.urls import PARALLEL_REQUESTS

logger = logging.getLogger(__name__)

_TOUCH_SECONDS = 1.0


class Prefetcher:
    """Downloads shards of a split to the cache, as many as fit into this process's part of it.

    Its daemon threads do not delay the end of the process. Their errors are not the run's: the
    reader of a shard tries again, and reports a failure.

    Args:
        shards: the split's shards and their remote datasets; None for local ones.
        working_set: number of shards that this process reads at a time.

    Raises:
        ConfigError: the cache is too small for the shards that are read at a time.
    """

    def __init__(
        self, shards: Sequence[tuple[RemoteDataset | None, ShardInfo]], working_set: int
    ) -> None:
        self._shards = shards
        self._bytes = np.array([shard.bytes if remote else 0 for remote, shard in shards])
        cache = next(remote.cache for remote, _ in shards if remote)
        processes = max(1, number("LOCAL_WORLD_SIZE", 1))
        # The working set changes all the time, so assume that it has the largest shards.
        needed = min(
            int(self._bytes.sum()), processes * int(np.sort(self._bytes)[-working_set:].sum())
        )
        capacity = cache.capacity
        if needed > capacity:
            by = "data.cache_size" if capacity == cache.limit else "its disk"
            raise ConfigError(
                f"the cache {cache.folder} takes {capacity:,} bytes (limited by {by}), but this "
                f"node's processes ({processes}) read up to {working_set} shards each at a time, "
                f"{needed:,} bytes. Set data.cache_size to {_round_up(needed)} or more, data.cache "
                "to a larger disk, or lower data.lanes or data.window (in a new run)."
            )
        self._capacity = capacity // processes
        self._begun: set[int] = set()
        self._touched = time.monotonic()
        self._waiting: list[int] = []  # the most urgent last
        self._closed = False
        self._changed = threading.Condition()
        for _ in range(PARALLEL_REQUESTS):
            threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def expect(self, shards: Int64) -> None:
        """Replaces the list of shards that will be needed, the most urgent first."""
        _, first = np.unique(shards, return_index=True)
        # Remove duplicates but keep the order of urgency.
        shards = shards[np.sort(first)]
        shards = shards[self._bytes[shards] > 0]
        numbers = shards[np.cumsum(self._bytes[shards]) <= self._capacity].tolist()
        with self._changed:
            # Shards that dropped out of the list may be needed again later.
            self._begun.intersection_update(numbers)
            self._waiting = [number for number in reversed(numbers) if number not in self._begun]
            here = sorted(self._begun)
            self._changed.notify_all()
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            # Otherwise shards downloaded early would be evicted before unneeded ones.
            for number in here:
                remote, shard = self._shards[number]
                if remote:
                    remote.touch(shard)

    def close(self) -> None:
        """Ends the threads; a running download finishes in the background."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                number = self._waiting.pop()
                self._begun.add(number)
            remote, shard = self._shards[number]
            try:
                if remote:
                    remote.fetch(shard)
            except Exception as error:  # whoever needs the shard gets the error
                logger.debug("not downloaded in advance: %s", error)


def _round_up(size: int) -> str:
    return f"{-(-size // 10**9)}GB" if size > 10**9 else f"{-(-size // 10**6)}MB"
