"""Progress of a long command: one line, redrawn, on a terminal; elsewhere a log line at times."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.environment import prepare_streams

if TYPE_CHECKING:
    from samestep.terminal import Console

logger = logging.getLogger(__name__)

_DRAW_EVERY = 0.2  # seconds
_LOG_EVERY = 15.0
_WIDE = 110  # columns of a terminal with space for a long bar

T = TypeVar("T")


class Progress:
    """Shows finished work and the time left; a context manager.

    Args:
        title: what is being done, such as "labeling".
        total: units of work; None if it is unknown or nothing is to be shown.
        done: units that are finished already.
        logs: whether to log lines where there is no terminal.
        stays: whether the last state of the line stays on the terminal.
        console: standard error by default.

    Attributes:
        on_terminal: whether the line is redrawn in place.
        console: prints above the line.
    """

    def __init__(
        self,
        title: str,
        total: float | None,
        *,
        done: float = 0.0,
        logs: bool = True,
        stays: bool = False,
        console: Console | None = None,
    ) -> None:
        # Imported here, as `samestep --help` must be fast.
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        from samestep.terminal import Console

        def text(field: str) -> TextColumn:
            return TextColumn(
                f"{{task.fields[{field}]}}", markup=False, table_column=Column(no_wrap=True)
            )

        self.console = console or Console(stderr=True)
        self.on_terminal = total is not None and self.console.is_terminal
        self._title, self._total = title, total or 0.0
        self._logs = logs and total is not None
        self._first = self._done = done
        self._started = self._shown = time.monotonic()
        self._bar_width = 40 if self.console.width >= _WIDE else 16
        self._bar = Progress(
            text("title"),
            BarColumn(bar_width=self._bar_width),
            text("count"),
            text("left"),
            text("note"),
            console=self.console,
            disable=not self.on_terminal,
            transient=not stays,
            refresh_per_second=1 / _DRAW_EVERY,
        )
        self._fields: dict[str, Any] = {"count": self._count(), "left": "", "note": ""}
        self._task = self._bar.add_task("", total=self._total, title=title, **self._fields)
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Draws the line, if there is a terminal."""
        self._bar.start()
        if self.on_terminal:
            prepare_streams()  # Rich has replaced them, and would obey control characters
            self.console.show_cursor()  # a killed process could not restore it

    def stop(self) -> None:
        """Stops drawing; what stays is the last state."""
        self._bar.update(self._task, completed=self._done, **self._fields)
        self._bar.stop()

    def advance(self, count: float = 1.0) -> None:
        """Adds finished units."""
        self.update(self._done + count)

    def update(self, done: float, note: str = "", left: str | None = None) -> None:
        """Sets what is finished. It may be called often: it draws and logs only at times.

        Args:
            done: units.
            note: follows on the line.
            left: text about the time left; None estimates it from the units finished so far.
        """
        self._done = done
        now = time.monotonic()
        left = self._left(now) if left is None else left
        self._fields = {"count": self._count(), "left": left, "note": self._fitting(note, left)}
        if now - self._shown < (_DRAW_EVERY if self.on_terminal else _LOG_EVERY):
            return
        self._shown = now
        if self.on_terminal:
            # Sets values only; a thread draws them.
            self._bar.update(self._task, completed=done, **self._fields)
        elif self._logs:
            parts = (f"{self._title} {note}".strip(), self._fields["count"], left)
            logger.info("%s", ", ".join(filter(None, parts)))

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, each a unit of work."""
        for item in items:
            yield item
            self.advance()

    def _count(self) -> str:
        # Shares of a whole are shown in per cent, things by their number.
        if self._total <= 1:
            return f"{100 * min(1.0, self._done):.0f}%"
        return f"{self._done:,.0f}/{self._total:,.0f}"

    def _fitting(self, note: str, left: str) -> str:
        """The beginning of a note, as much as the line has space for."""
        if not self.on_terminal:
            return note
        # Rich would break the line, and redrawing it would leave a part behind.
        shown = (self._title, self._bar_width * " ", self._count(), left)
        return note[: max(0, self.console.width - sum(len(each) + 1 for each in shown) - 1)]

    def _left(self, now: float) -> str:
        """The time left at the mean rate so far."""
        finished = self._done - self._first
        if finished <= 0:
            return ""
        return f"{clock((now - self._started) * (self._total - self._done) / finished)} left"


def clock(seconds: float) -> str:
    """Formats a duration: 0:45, 12:30 or 3:05:00."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def ends_in(low: float, high: float) -> str:
    """Formats a forecast: ends in 1:50 to 2:20."""
    return f"ends in {clock(low)} to {clock(high)}"
