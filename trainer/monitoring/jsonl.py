"""metrics.jsonl: one JSON object a line, the record that every other view of a run is made from."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import ne
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypedDict, cast

from samestep.errors import DataError, SamestepError, StorageError, fix_of
from samestep.storage import write_text
from samestep.stored_json import (
    Between,
    Count,
    JsonError,
    Measure,
    Seconds,
    checked,
    parse_json,
    read_lines,
)
from samestep.untrusted import open_regular
from trainer.monitoring import Level, Tracker

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
"""A line of a file: step, time, and numbers or words by name."""

_PIECE_BYTES = 2**22

ALERTS = "alerts.jsonl"
CLASSES = "classes.json"
"""File in a run's folder: faults, failures and restarts, with level, title and text."""


def read_rows(path: Path, nested: bool = False) -> Iterator[Row]:
    """Yields the rows of a metrics file: {"step": n, "time": Unix time, name: value...}.

    A missing file has no rows. Torn lines, which a kill or a full disk can leave, and other damaged
    ones are skipped and counted in a warning. A column with a damaged name is reported.

    Args:
        nested: keep rows that have lists or objects as values, too.
    """
    rows: dict[int, Row] = {}
    skipped: list[tuple[int, JsonError]] = []
    try:
        with open_regular(path) as file:
            for number, (line, _, _) in enumerate(read_lines(file), start=1):
                try:
                    rows[number] = _parse(line, nested)
                except JsonError as error:
                    skipped.append((number, error))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unreadable(path, error) from error
    if skipped:
        number, reason = skipped[0]
        more = f", nor are {len(skipped) - 1} others; they are" if skipped[1:] else "; it is"
        text = "%s, line %d is not a row of metrics (%s)%s skipped"
        logger.warning(text, path, number, reason, more)
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


class _Stamp(TypedDict):
    step: Count
    time: Seconds


def _parse(line: bytes, nested: bool = False) -> Row:
    """Returns the row of a line.

    Raises:
        JsonError: the line is torn, has no step and time, or values that a metric cannot have.
    """
    # A flipped bit may break the encoding of a name; the other values of the row are still good.
    text = line.decode(errors="replace")
    if nested:
        return cast(Row, parse_json(text, _Stamp))
    # Numbers and words only, as a page may show the row of a stranger.
    row: Row = parse_json(text, dict[str, Measure | str | bool | None])
    checked({name: row[name] for name in ("step", "time") if name in row}, _Stamp)
    return row


_Example: TypeAlias = Annotated[int, Between(0, 2**62)]  # its sums fit into 64 bits


class _Entry(TypedDict):
    """What all rows of ledger.jsonl have, see `trainer.training.ledger`."""

    step: Count
    time: Seconds
    kind: str
    head: str


class _Order(_Entry):
    order: Count


class _Fed(_Entry):
    order: Count
    first_step: Count
    examples: list[tuple[_Example, _Example]]
    digest: str


class _Excluded(_Entry):
    order: Count
    examples: list[tuple[_Example, _Example]]
    reason: str


class _Corrupt(_Entry):
    order: Count
    dataset: str
    shard: str
    first: Count


class _Lost(_Entry):
    before: str


_LEDGER: dict[str, Any] = {
    "order": _Order,
    "fed": _Fed,
    "excluded": _Excluded,
    "corrupt": _Corrupt,
    "lost": _Lost,
}


def parse_start(line: bytes) -> Row:
    """Returns the row of a line of starts.jsonl.

    Raises:
        JsonError: it is torn, or damaged.
    """
    row = _parse(line)
    checked(row, dict[str, float | str | bool | None])
    return row


class _Alert(TypedDict):
    step: Count
    time: Seconds
    level: str
    title: str
    text: str


def parse_alert(line: bytes) -> Row:
    """Returns the row of a line of alerts.jsonl.

    Raises:
        JsonError: it is torn, or damaged.
    """
    return cast(Row, parse_json(line, _Alert))


def parse_ledger_row(line: bytes) -> Row:
    """Returns the row of a line of ledger.jsonl, with all that its kind has.

    Raises:
        JsonError: it is torn, or damaged.
    """
    row: Row = parse_json(line, dict[str, Any])
    checked(row, _Entry)
    checked(row, _LEDGER.get(row["kind"], _Entry))
    return row


class RowReader:
    """Reads a file of rows while another process appends to it; each line is read once.

    A stranger's file may be huge, so a call reads some megabytes of it; see `pieces`. A link is
    not followed, as it could show the content of any other file.

    A run that continues from a checkpoint removes its later rows. The reader then starts over: it
    notices because the last line that it has read is no longer in its place.

    Args:
        parse: returns the row of a line, or raises a `JsonError`.

    Attributes:
        damaged: a sentence about the first line that is no row; empty if all are rows.
        damaged_lines: number of such lines.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Row] = _parse) -> None:
        self._path, self._parse = path, parse
        self._end = self._lines = 0  # end and number of the last whole line read
        self._last = b""
        self.damaged, self.damaged_lines = "", 0

    def pieces(self) -> Iterator[tuple[list[Row], bool]]:
        """Yields results of `read` until there are no more new rows, the empty one included."""
        rows: list[Row] = [{}]
        while rows:
            rows, replaced = self.read()
            yield rows, replaced

    def read(self) -> tuple[list[Row], bool]:
        """Returns new rows, and whether they replace all rows that were returned before.

        The end of a line that is being written is left for the next call. A missing file has no
        rows.
        """
        rows: list[Row] = []
        try:
            with open_regular(self._path, links=False) as file:
                # The last line has a time of its own, so after a cut another one stands there.
                file.seek(self._end - len(self._last))
                replaced = file.read(len(self._last)) != self._last
                if replaced:
                    file.seek(0)
                    self._forget()
                begin = self._end
                for line, end, is_whole in read_lines(file):
                    # At least one row a call, however long, or a reader would never get on.
                    if not is_whole or (rows and end > begin + _PIECE_BYTES):
                        break
                    self._end, self._last = end, line
                    self._lines += 1
                    try:
                        rows.append(self._parse(line))
                    except JsonError as error:
                        where = f"{self._path.name}, line {self._lines}"
                        self.damaged = self.damaged or f"{where}: {error}"
                        self.damaged_lines += 1
        except (FileNotFoundError, NotADirectoryError):
            replaced = self._end > 0
            self._forget()
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return rows, replaced

    def _forget(self) -> None:
        self._end, self._lines, self._last = 0, 0, b""
        self.damaged, self.damaged_lines = "", 0


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
                # Also drops damaged lines. A crash leaves either the old file or the new one.
                # Nested: ledger.jsonl and others of this format have lists in their rows.
                rows = [row for row in read_rows(path, nested=True) if row["step"] <= resume_step]
                write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            self._file = path.open("ab", buffering=0)
        # A torn last line must not take the next row with it.
        self._waiting = b"" if _is_whole(path) else b"\n"
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
        # Appended before the write: if that fails, the row waits with the others.
        self._waiting += f"{json.dumps(row)}\n".encode()
        try:
            self._write()
        except OSError as error:
            # Once, not at every step, until a write succeeds again.
            if not self._warned:
                fix = fix_of(error, "give access")
                text = "rows of %s wait in memory: %s; %s"
                logger.warning(text, self.path, error.strerror, fix)
            self._warned = True

    def alert(self, level: Level, title: str, text: str) -> None:
        """Appends to alerts.jsonl."""
        row: Row = {"step": self._step, "time": round(time.time(), 3)}
        row |= {"level": level, "title": title, "text": text}
        # The run may be failing because of the disk, and its own error must be the one shown.
        path = self.path.with_name(ALERTS)
        with suppress(OSError), path.open("ab") as file:
            file.write(b"\n" * (not _is_whole(path)) + f"{json.dumps(row)}\n".encode())

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
                f"cannot write the metrics to {self.path}: {error.strerror}; "
                f"{fix_of(error, 'give access')}, then start the run again: it resumes from its "
                "newest checkpoint"
            ) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot read {path}: {error.strerror}. Give access, or restore the file.")


def _is_whole(path: Path) -> bool:
    """Whether a file of lines is empty, or its last line ends with a line feed."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
