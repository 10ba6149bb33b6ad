"""State of a run, and of its ledger, for the page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samestep.config import Tree
from trainer.monitoring.jsonl import Row

_STALLED_SECONDS = 60.0  # without a row, at least
_STALLED_ROWS = 5  # and the time of this number of rows


def state_of(
    folder: Path,
    summary: Mapping[str, Any],
    times: npt.NDArray[np.float64],
    starts: Sequence[Row],
    alerts: Sequence[Row],
    age: float,
) -> str:
    """Returns waiting, starting, running, stalled, stopped, failed or finished.

    Args:
        folder: of the run.
        summary: with the keys `step` and `steps`.
        times: of the rows of metrics.
        starts: of the run.
        alerts: of the run.
        age: seconds since the last row has come.
    """
    if not starts and not len(times):
        return "waiting"
    if summary["steps"] is not None and summary["step"] >= summary["steps"]:
        return "finished"
    started = starts[-1]["time"] if starts else 0.0
    if any(alert["level"] == "ERROR" and alert["time"] >= started for alert in alerts):
        return "failed"
    if not has_owner(folder):
        return "stopped"
    if not len(times) or (starts and summary["step"] <= starts[-1]["step"]):
        return "starting"  # by steps: a clock may have been set back in between
    # A row of 100 long steps may take minutes, so the limit follows the run's own rows.
    usual = float(np.median(np.diff(times[-20:]))) if len(times) > 1 else 0.0
    limit = max(_STALLED_SECONDS, _STALLED_ROWS * usual)
    return "stalled" if age > limit else "running"


def has_owner(folder: Path) -> bool:
    """Whether a training says that it writes to a run's folder."""
    # The note of trainer.checkpoint.lock, which is removed when the training ends. A killed one
    # leaves it; its rows then become old.
    return any((place / ".owner").exists() for place in (folder / "checkpoints", folder))


def is_inside(file: Path, *folders: Path) -> bool:
    """Whether a file exists and lies in one of the folders, wherever links and `..` lead.

    The folder of a study or a suite may be a stranger's, and the page shows what it names.
    """
    # Unlike Path.resolve(), without an error for links that form a circle.
    place = Path(os.path.realpath(file))
    return file.is_file() and any(place.is_relative_to(folder.absolute()) for folder in folders)


class Ledger:
    """What the rows of a ledger say, without verifying their hashes.

    Attributes:
        faults: rows about data that was skipped or rows that were lost, as alerts.
    """

    def __init__(self) -> None:
        self.faults: list[Row] = []
        self._rows = self._orders = 0
        self._head = ""
        # Ranges of steps [first, last] whose examples are recorded, merged.
        self._steps: list[list[int]] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Adds new rows of ledger.jsonl."""
        for row in rows:
            kind, self._head = row.get("kind"), str(row.get("head", ""))
            self._rows += 1
            self._orders += kind == "order"
            if kind == "fed":
                first, last = row["first_step"], row["step"]
                if self._steps and self._steps[-1][1] + 1 == first:
                    self._steps[-1][1] = last
                else:
                    self._steps.append([first, last])
            elif kind in ("excluded", "corrupt", "lost"):
                self.faults.append(_fault(kind, row))

    def describe(self, starts: Sequence[int]) -> Tree:
        """The ledger, as page.js reads it.

        Args:
            starts: the steps that the run was started from.
        """
        # Where one process ended and the next continued, the steps before and after must both be
        # recorded: a start at step 40 is joined if steps 40 and 41 lie in one range.
        edges = [step for step in starts if step > 0]
        joined = [
            step
            for step in edges
            if any(
                first <= step < last or step == self._steps[-1][1] for first, last in self._steps
            )
        ]
        return {
            "rows": self._rows,
            "orders": self._orders,
            "head": self._head[:12],
            "steps": self._steps,
            "edges": len(edges),
            "joined": len(joined),
        }


def _fault(kind: str, row: Row) -> Row:
    if kind == "excluded":
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in row["examples"])
        text = f"{ranges}: {row['reason']}"
        title = "Examples are skipped"
    elif kind == "corrupt":
        title, text = "A shard is corrupt", f"{row['shard']} is skipped from {row['first']} on"
    else:
        title, text = "The ledger was lost", "steps before this one cannot be verified"
    return {"step": row["step"], "time": row["time"], "level": "WARN", "title": title, "text": text}
