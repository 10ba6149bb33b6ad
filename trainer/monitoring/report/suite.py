"""Progress of a suite of fine-tuning runs, from the files in its folder."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict, TypeVar

from samestep.config import Tree
from samestep.errors import DataError
from samestep.stored_json import (
    Between,
    Count,
    JsonError,
    Measure,
    Name,
    Seconds,
    damage_of,
    parse_json,
    read_json,
    read_lines,
)
from samestep.untrusted import open_regular
from trainer.monitoring.forecast import Range, suite_left
from trainer.monitoring.jsonl import RowReader
from trainer.monitoring.report.status import has_owner, is_inside

T = TypeVar("T")

PLAN = "suite.json"
"""File in a suite's folder: the runs that it should have, see `PlannedRun`."""
_METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class PlannedRun:
    """A run of a suite, in suite.json.

    Attributes:
        task: its name.
        run: its name among the task's runs.
        digest: key of its result in results.jsonl.
        folder: of its files, inside of the suite's.
        score: name of the score that counts.
        steps: optimizer steps.
    """

    task: str
    run: str
    digest: str
    folder: Name
    score: str
    steps: Count


class _Plan(TypedDict, total=False):
    runs: list[PlannedRun]
    slots: Annotated[int, Between(1, 2**20)]


class _Result(TypedDict):
    digest: str
    scores: dict[str, Measure]
    seconds: Seconds


class SuiteFolder:
    """A suite: `describe` reads the small files again, and of running runs the new rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._metrics: dict[str, RowReader] = {}
        self._steps: dict[str, int] = {}

    def describe(self, name: str) -> Tree:
        """The suite, as page.js reads it."""
        plan = self._plan()
        runs = plan.get("runs", [])
        results = self._results()
        running = self._running(runs, results)
        seconds = {digest: result["seconds"] for digest, result in results.items()}
        return {
            "name": name,
            "path": str(self._folder.resolve()),
            "finished": sum(run.digest in results for run in runs),
            "total": len(runs),
            "eta": self.left(runs, seconds, plan.get("slots", 1)),
            "running": [
                {"task": run.task, "run": run.run, "step": running[run.digest], "steps": run.steps}
                for run in runs
                if run.digest in running
            ],
            "tasks": [
                _task(task, [run for run in runs if run.task == task], results)
                for task in dict.fromkeys(run.task for run in runs)
            ],
        }

    def left(
        self, runs: Sequence[PlannedRun], seconds: Mapping[str, float], slots: int
    ) -> Range | None:
        """Forecasts the seconds until the last run ends; None before the first has ended.

        Args:
            seconds: of the finished runs, by digest.
            slots: number of runs at a time.
        """
        done = self._running(runs, seconds)
        return suite_left(
            [(run.task, run.steps, seconds[run.digest]) for run in runs if run.digest in seconds],
            [
                (run.task, max(0, run.steps - done.get(run.digest, 0)))
                for run in runs
                if run.digest not in seconds
            ],
            slots,
        )

    def _running(self, runs: Sequence[PlannedRun], finished: Collection[str]) -> dict[str, int]:
        """The steps of the running runs so far, by digest."""
        return {
            run.digest: self._step(run)
            for run in runs
            if run.digest not in finished
            and is_inside(self._folder / run.folder / _METRICS, self._folder)
            and has_owner(self._folder / run.folder)
        }

    def _plan(self) -> _Plan:
        file = self._folder / PLAN
        with damage_of(file, DataError, "Run the suite again, or restore it."):
            return read_json(file, _Plan)

    def _results(self) -> dict[str, _Result]:
        return {result["digest"]: result for result in read_results(self._folder, _Result)}

    def _step(self, run: PlannedRun) -> int:
        reader = self._metrics.setdefault(
            run.digest, RowReader(self._folder / run.folder / _METRICS)
        )
        for rows, replaced in reader.pieces():
            if rows or replaced:
                self._steps[run.digest] = rows[-1]["step"] if rows else 0
        return self._steps.get(run.digest, 0)


def read_results(folder: Path, schema: type[T]) -> list[T]:
    """Returns the rows of a suite's results.jsonl, which is missing before the first run has ended.

    Raises:
        DataError: a row is damaged.
    """
    file, found = folder / "results.jsonl", list[T]()
    try:
        with open_regular(file) as content:
            for line, _, _ in read_lines(content):
                found.append(parse_json(line, schema))
    except FileNotFoundError:
        return []
    except (OSError, JsonError) as error:
        raise DataError(
            f"{file}, line {len(found) + 1} is damaged: {error}. Remove the line to train its run "
            "again, or restore the file."
        ) from error
    return found


def _task(name: str, runs: Sequence[PlannedRun], results: Mapping[str, _Result]) -> Tree:
    finished = [run for run in runs if run.digest in results]
    scores = [results[run.digest]["scores"].get(run.score, math.nan) for run in finished]
    # A run that has diverged may have NaN as its score, which the page's JSON cannot hold.
    known = [score for score in scores if math.isfinite(score)]
    return {
        "task": name,
        "score": runs[0].score,
        "finished": len(finished),
        "total": len(runs),
        "mean": statistics.mean(scores) if scores and known == scores else None,
        "best": max(known, default=None),
        "seconds": sum(results[run.digest]["seconds"] for run in finished),
    }
