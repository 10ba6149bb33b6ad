"""Progress of a long command: a bar on a terminal, elsewhere a log line every few seconds."""

from __future__ import annotations

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

_DRAW_EVERY = 0.2  # seconds
_LOG_EVERY = 15.0


class Meter:
    """Counts megabytes and shows them with their rate and the time left; a context manager."""

    def __init__(self, title: str) -> None:
        self.megabytes = 0.0
        self._title = title
        self._share, self._documents = 0.0, 0
        self._started = self._shown = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=1.0)

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

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
        # Called for every record, and drawing takes longer than reading one.
        now = time.monotonic()
        if now - self._shown < (_LOG_EVERY if self._bar.disable else _DRAW_EVERY):
            return
        self._shown = now
        rate = self.megabytes / self.seconds
        text = f"{self._title} {rate:.2f} MB/s, {self._documents:,} documents"
        if self._bar.disable:
            left = self.seconds * (1 - self._share) / max(self._share, 1e-9)
            logger.info("%s, %.0f%%, %.0f s left", text, 100 * self._share, left)
        else:
            self._bar.update(self._task, completed=self._share, description=text)
