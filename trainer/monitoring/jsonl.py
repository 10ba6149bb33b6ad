"""metrics.jsonl: one JSON object a line, the record of a run that every other view is made from."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from trainer.errors import SamestepError
from trainer.monitoring import Tracker

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
"""A line of a file: its step, its time, and numbers or words by name."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows {"step": n, "time": seconds since 1970, name: value...} of a metrics file, if there is one.

    Lines that are no such rows, as a kill or a full disk can leave behind, are passed over.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                row |= {"step": int(row["step"]), "time": float(row["time"])}
            except (ValueError, TypeError, KeyError):
                logger.warning(
                    "%s, line %d is no row of metrics (torn by a kill?); it is passed over",
                    path,
                    number,
                )
                continue
            yield row


def scores_of(row: Mapping[str, Any], of_tokens: bool) -> dict[str, float]:
    """The scores in a row of an evaluation, by name.

    Args:
        row: of metrics.jsonl or scores.jsonl.
        of_tokens: whether the model predicts tokens, as one that writes texts: where the held-out split is scored by
            these, its accuracy is called token_accuracy, as it is not that of the texts.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        group, _, name = key.partition("/")
        if group in ("heldout", "generated"):
            found["token_accuracy" if key == "heldout/accuracy" and of_tokens else name] = value
    return found


class JsonlTracker(Tracker):
    """Appends rows to metrics.jsonl; each is handed to the operating system at once, so a killed process loses none.

    While the disk is full, rows wait in memory, and training goes on.

    Args:
        path: the file; made if missing.
        resume_step: the step that training continues from; rows after it, which will be made again, are removed. None
            keeps all rows.

    Raises:
        SamestepError: the file cannot be written; also from `close`, for rows that still wait.
    """

    def __init__(self, path: Path, resume_step: int | None = 0) -> None:
        self.path = path
        with self._explained():
            if resume_step is not None and path.exists():
                self._rewind(resume_step)
            self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._warned = False

    def _rewind(self, step: int) -> None:
        """Rewrites the file without later rows and torn lines; a crash leaves either the old file or the new one."""
        kept = self.path.with_suffix(".tmp")
        with kept.open("w", encoding="utf-8") as file:
            for row in read_rows(self.path):
                if row["step"] <= step:
                    file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        kept.replace(self.path)

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Appends a row."""
        self._waiting += (
            json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n"
        ).encode()
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "rows of %s wait in memory: %s; make room or give access",
                    self.path,
                    error.strerror,
                )
            self._warned = True

    def sync(self) -> None:
        """Returns when all rows that the disk takes would survive a loss of power."""
        with suppress(OSError):
            self._write()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with self._explained(), self._file:
            self._write()

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._warned = False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SamestepError(
                f"cannot write the metrics to {self.path}: {error.strerror}; make room or give access, then start the "
                "run again: it continues from its newest checkpoint"
            ) from error
