"""Downloads of the shards that will be needed, before they are."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from data_pipeline.format.manifest import ShardInfo
from data_pipeline.packing.plan import Int64
from data_pipeline.reading.remote import RemoteDataset
from trainer.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_THREADS = 8
_TOUCH_SECONDS = 1.0


class Prefetcher:
    """Brings shards of a split into the cache, as many as this process's part of it holds.

    Its threads do not hold up the end of the process. An error of theirs is not one of the run: who
    needs the shard tries again, and says so if it fails.

    Args:
        shards: those of the split, and where they are; None for those that are on this machine
            anyway.
        working_set: how many of them this process reads from at a time.

    Raises:
        ConfigError: the cache is too small for what the processes of this node read from at a time.
    """

    def __init__(
        self, shards: Sequence[tuple[RemoteDataset | None, ShardInfo]], working_set: int
    ) -> None:
        self._shards = shards
        self._bytes = np.array([shard.bytes if remote else 0 for remote, shard in shards])
        cache = next(remote.cache for remote, _ in shards if remote)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Which shards are read from changes all the time, so the largest stand for all.
        needed = min(
            int(self._bytes.sum()), processes * int(np.sort(self._bytes)[-working_set:].sum())
        )
        capacity = cache.capacity
        if needed > capacity:
            limit = cache.limit
            reason = (
                f"data.cache_size is {limit:,} bytes"
                if capacity == limit
                else "its disk has no more to give"
            )
            raise ConfigError(
                f"the cache {cache.folder} takes {capacity:,} bytes ({reason}) and is too small: "
                "this run's "
                f"processes on this node ({processes}) read from up to {working_set} shards each "
                "at a time, "
                f"{needed:,} bytes together; set data.cache_size to {_round_up(needed)} or more, "
                "or data.cache to a "
                f"folder of a larger disk, or lower data.lanes or data.window (in a new run)"
            )
        self._capacity = capacity // processes
        self._begun: set[int] = set()
        self._touched = time.monotonic()
        self._waiting: list[int] = []  # the most urgent last
        self._closed = False
        self._changed = threading.Condition()
        for _ in range(_THREADS):
            threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def expect(self, shards: Int64) -> None:
        """Says which shards will be needed, the most urgent first.

        It replaces what was said before.
        """
        _, first = np.unique(shards, return_index=True)
        shards = shards[np.sort(first)]
        shards = shards[self._bytes[shards] > 0]
        numbers = shards[np.cumsum(self._bytes[shards]) <= self._capacity].tolist()
        with self._changed:
            self._begun.intersection_update(numbers)
            self._waiting = [number for number in reversed(numbers) if number not in self._begun]
            here = sorted(self._begun)
            self._changed.notify_all()
        if time.monotonic() - self._touched >= _TOUCH_SECONDS:
            self._touched = time.monotonic()
            for number in (
                here
            ):  # or shards that came early would make room before those that nobody needs any more
                remote, shard = self._shards[number]
                if remote:
                    remote.touch(shard)

    def close(self) -> None:
        """Ends the threads; a download that has begun is finished in the background."""
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
            except DataError as error:
                logger.debug("not downloaded ahead: %s", error)


def _round_up(size: int) -> str:
    return f"{-(-size // 10**9)}GB" if size > 10**9 else f"{-(-size // 10**6)}MB"
