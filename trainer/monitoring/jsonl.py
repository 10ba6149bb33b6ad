"""metrics.jsonl: one JSON object a line, the record that every other view of a run is made from."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import ne
from pathlib import Path
from typing import Any, TypeAlias

from trainer.errors import DataError, SamestepError
from trainer.monitoring import Level, Tracker
from trainer.storage import write_text

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
"""A line of a file: step, time, and numbers or words by name."""

ALERTS = "alerts.jsonl"
"""File in a run's folder: faults, failures and restarts, with level, title and text."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a metrics file: {"step": n, "time": Unix time, name: value...}.

    A missing file has no rows. Torn lines, which a kill or a full disk can leave, are skipped. A
    column with a damaged name is reported.
    """
    if not path.exists():
        return
    rows: dict[int, Row] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is None:
                logger.warning("%s, line %d is not a row of metrics; it is skipped", path, number)
            else:
                rows[number] = row
    for number, column, name in _damaged_columns(rows):
        logger.warning("%s, line %d has %r instead of %r", path, number, column, name)
    yield from rows.values()


def _damaged_columns(rows: Mapping[int, Row]) -> Iterator[tuple[int, str, str]]:
    """Yields columns with a flipped bit in their name, as (line, column, usual name).

    Such a column is in one row only, which lacks the column that differs in one character.
    """
    counts = Counter(itertools.chain.from_iterable(rows.values()))
    usual = {column for column, count in counts.items() if count > 1}
    for number, row in rows.items():
        for column in row.keys() - usual:
            for name in usual - row.keys():
                if len(name) == len(column) and sum(map(ne, name, column)) == 1:
                    yield number, column, name


def _parse(line: str | bytes) -> Row | None:
    """Returns the row of a line; None for a torn line, or one without a step and a time."""
    try:
        row = json.loads(line)
        found: Row = row | {"step": int(row["step"]), "time": float(row["time"])}
    except (ValueError, TypeError, KeyError):
        return None
    return found


class RowReader:
    """Reads a file of rows while another process appends to it; each line is read once.

    A run that continues from a checkpoint removes its later rows. The reader then starts over: it
    notices because the last line that it has read is no longer in its place.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0  # of the last whole line read
        self._last = b""

    def read(self) -> tuple[list[Row], bool]:
        """Returns the new rows, and whether they replace all rows that were returned before.

        The end of a line that is being written is left for the next call. A missing file has no
        rows.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                replaced = file.read(len(self._last)) != self._last
                if replaced:
                    file.seek(0)
                    self._end, self._last = 0, b""
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            replaced, self._end, self._last = self._end > 0, 0, b""
            return [], replaced
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if lines:
            self._end += sum(map(len, lines))
            self._last = lines[-1]
        return [row for row in map(_parse, lines) if row is not None], replaced


def read_metrics(run: str | Path) -> list[Row]:
    """Returns the rows of a run's metrics.jsonl, which also grows while the run goes on.

    Args:
        run: the run's output folder.

    Raises:
        DataError: there is no such file.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{run} has no metrics.jsonl; name the output folder of a run")
    return list(read_rows(path))


def scores_of(
    row: Mapping[str, Any],
    of_tokens: bool,
) -> dict[str, float]:
    """Returns the held-out and generation scores in a row of metrics.jsonl or scores.jsonl.

    Args:
        of_tokens: the model predicts tokens. Its held-out accuracy is then called token_accuracy,
            to tell it from the accuracy of generated texts.
    """
    # Other groups of a row, such as train/ and perf/, say nothing about a checkpoint's quality.
    found: dict[str, float] = {}
    for key, value in row.items():
        group, _, name = key.partition("/")
        if group in ("heldout", "generated"):
            found["token_accuracy" if key == "heldout/accuracy" and of_tokens else name] = value
    return found


class JsonlTracker(Tracker):
    """Appends rows to metrics.jsonl, unbuffered, so that a killed process loses none.

    While the disk is full, rows wait in memory and training continues. Alerts go to alerts.jsonl in
    the same folder.

    Args:
        path: the file; created if missing.
        resume_step: the step that training resumes from. Later rows are removed, because they will
            be computed again. None keeps all rows.

    Raises:
        SamestepError: the file cannot be written; also from `close`, if rows are still waiting.
    """

    def __init__(self, path: Path, resume_step: int | None = 0) -> None:
        self.path = path
        with self._explained():
            if resume_step is not None and path.exists():
                # Also drops torn lines. A crash leaves either the old file or the new one.
                rows = [row for row in read_rows(path) if row["step"] <= resume_step]
                write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._warned = False
        self._step = resume_step or 0

    def log(
        self,
        step: int,
        metrics: Mapping[str, float | str],
    ) -> None:
        """Appends a row."""
        self._step = step
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        self._waiting += f"{json.dumps(row)}\n".encode()
        try:
            self._write()
        except OSError as error:
            # Once, not at every step, until a write succeeds again.
            if not self._warned:
                text = "rows of %s wait in memory: %s; free space or give access"
                logger.warning(text, self.path, error.strerror)
            self._warned = True

    def alert(self, level: Level, title: str, text: str) -> None:
        """Appends to alerts.jsonl."""
        row: Row = {"step": self._step, "time": round(time.time(), 3)}
        row |= {"level": level, "title": title, "text": text}
        # The run may be failing because of the disk, and its own error must be the one shown.
        with suppress(OSError), self.path.with_name(ALERTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Flushes rows to the disk, as far as there is space, so that they survive a power loss."""
        with suppress(OSError):
            self._write()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with self._explained(), self._file:
            self._write()

    def _write(self) -> None:
        # A full disk may take a part of a line. The rest waits and is written behind it.
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._warned = False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SamestepError(
                f"cannot write the metrics to {self.path}: {error.strerror}; free space or give "
                "access, then start the run again: it resumes from its newest checkpoint"
            ) from error
