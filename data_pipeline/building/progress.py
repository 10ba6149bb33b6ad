"""Progress of a build: megabytes and documents, with their rate and the time left."""

from __future__ import annotations

import time

from samestep.progress import Progress


class Meter:
    """Counts megabytes and shows them; a context manager."""

    def __init__(self, title: str) -> None:
        self.megabytes = 0.0
        self._share, self._documents = 0.0, 0
        self._started = time.monotonic()
        self._progress = Progress(title, 1.0)

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._started

    def advance(self, share: float, size: int, documents: int) -> None:
        """Adds finished work.

        Args:
            share: fraction of the whole.
            size: bytes; 0 for work of an earlier run, which must not raise the rate.
            documents: number of them.
        """
        self._share += share
        self._documents += documents
        self.megabytes += size / 1e6
        rate = self.megabytes / self.seconds
        self._progress.update(self._share, f"{rate:.2f} MB/s, {self._documents:,} documents")
