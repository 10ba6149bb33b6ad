"""Executes the runs of a suite, each as `samestep train` in a process, and keeps their results."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from samestep.errors import SamestepError
from samestep.storage import write_text
from samestep.stored_json import Count, Measure, Seconds
from trainer.checkpoint import integrity
from trainer.metrics.texts import PERCENT
from trainer.monitoring.forecast import Range
from trainer.monitoring.jsonl import Row, read_rows, scores_of
from trainer.monitoring.report import suite as report_suite
from trainer.monitoring.report import write_report
from trainer.monitoring.report.suite import PLAN, PlannedRun, SuiteFolder
from trainer.studies.execution import Execution, Slot
from trainer.studies.finetune.runs import Run
from trainer.training.experiment import Experiment

PREDICTIONS, REPORT = "predictions.jsonl", "report.html"
"""Files of a finished run: a line for each held-out row, and the page of `samestep report`."""


@dataclass(frozen=True)
class Result:
    """The result of a run, a line of results.jsonl.

    Attributes:
        task, run, settings, seed, digest: of the `Run`; `run` is its name.
        scores: of the held-out rows, by name: at the end, or at the best of several evaluations.
        steps: optimizer steps until then.
        seconds: wall time, without the time before an interruption.
        learned: whether the run scores above a constant answer, see `upper_end`.
    """

    task: str
    run: str
    settings: Mapping[str, float]
    seed: int
    digest: str
    scores: Mapping[str, Measure]
    steps: Count
    seconds: Seconds
    learned: bool


def ranked(score: float) -> float:
    """The score to compare runs by; NaN, as of weights that are no longer finite, is the lowest."""
    return -math.inf if math.isnan(score) else score


def read_results(folder: Path) -> dict[str, Result]:
    """Returns the results so far, by the digests of their runs."""
    return {result.digest: result for result in report_suite.read_results(folder, Result)}


class Suite:
    """A folder of runs and their results.

    Args:
        folder: of the suite.
        runs: the runs that it should have, each after those that it starts from.
        keep: keep the checkpoints of all finished runs, not only of the best one of each task.
    """

    def __init__(
        self,
        folder: Path,
        runs: Sequence[Run],
        keep: bool = False,
    ) -> None:
        self._folder, self._runs, self._keep_all = folder, runs, keep
        self._planned = [
            PlannedRun(
                run.task,
                run.name,
                run.digest,
                os.path.relpath(run.folder, folder),
                run.score,
                int(run.experiment["training"]["steps"]),
            )
            for run in runs
        ]
        self._progress = SuiteFolder(folder)
        # Results of other settings, weights or rows stay in the file and are not used.
        self._results = read_results(folder)
        self._unfinished = {run.digest for run in self.missing()}

    def missing(self) -> list[Run]:
        """The runs without a result, and runs that these start from without a checkpoint left."""
        missing = {run.digest for run in self._runs if run.digest not in self._results}
        # Backwards, so that a chain of starts is followed: a run that is trained again because
        # another starts from it may itself need the checkpoint of a third.
        for run in reversed(self._runs):
            if run.digest in missing and run.start and missing.isdisjoint(run.start):
                best = self._best(run.start)
                if not integrity.committed_steps(best.folder / "checkpoints"):
                    missing.add(best.digest)
        return [run for run in self._runs if run.digest in missing]

    def make(self, slots: Sequence[Slot], tell: Callable[[Run, Result | None], None]) -> list[str]:
        """Executes the missing runs, one at a time for each slot.

        Args:
            slots: one for each run that is executed at a time.
            tell: called with a run and None when it starts, and with its result when it ends.

        Returns:
            An error message for each run that failed.
        """
        self._write_plan(len(slots))
        self._tidy()

        def store(run: Run, result: Result | None) -> None:
            if result is not None:
                self._store(result)
            tell(run, result)

        self._execution = Execution(slots, self._train, store)
        return self._execution.run([run for run in self._runs if run.digest in self._unfinished])

    def _write_plan(self, slots: int) -> None:
        """Writes suite.json, from which `samestep watch` shows the progress of the whole."""
        plan = {"slots": slots, "runs": [asdict(run) for run in self._planned]}
        write_text(self._folder / PLAN, json.dumps(plan, indent=1) + "\n")

    def left(self, slots: int) -> Range | None:
        """Forecasts the seconds until the last run ends; None before the first has ended."""
        finished = {run.digest for run in self._runs} - self._unfinished
        seconds = {digest: self._results[digest].seconds for digest in finished}
        return self._progress.left(self._planned, seconds, slots)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def finished(self) -> int:
        """Number of finished runs."""
        return len(self._runs) - len(self._unfinished)

    def _store(self, result: Result) -> None:
        self._results[result.digest] = result
        # The file is replaced as a whole, so a kill leaves the old one or the new one.
        lines = (json.dumps(asdict(each)) + "\n" for each in self._results.values())
        write_text(self._folder / "results.jsonl", "".join(lines))
        self._unfinished.discard(result.digest)
        self._tidy()

    def _best(self, digests: Collection[str]) -> Run:
        """The run with the best score; of equal ones, the first."""
        runs = [run for run in self._runs if run.digest in digests]
        return max(runs, key=lambda run: ranked(self._results[run.digest].scores[run.score]))

    def _tidy(self) -> None:
        """Removes the checkpoints of finished runs, except of the best one of each task."""
        if self._keep_all:
            return
        groups: dict[tuple[str, bool], list[Run]] = {}
        for run in self._runs:
            if run.digest not in self._unfinished:
                groups.setdefault((run.task, run.scratch), []).append(run)
        for finished in groups.values():
            best = self._best([run.digest for run in finished])
            for run in finished:
                if run is not best:
                    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)

    def _train(
        self,
        run: Run,
        slot: Slot,
    ) -> Result:
        """Trains and evaluates a run, with all output in its log.txt.

        Raises:
            SamestepError: a command failed, or the run's score is missing.
        """
        # The run to start from is known only now: the best of another task's finished runs.
        experiment = dict(run.experiment)
        if run.start:
            best = self._best(run.start)
            weights = best.folder / "best" if best.keeps_best else best.folder
            experiment["init_from"] = str(weights)
        file = run.folder / "experiment.yaml"
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, yaml.safe_dump(experiment, sort_keys=False))
        commands = [["train", str(file), "--processes", "1"]]
        evaluate = ["evaluate", str(run.folder), "--processes", "1"]
        predictions = run.folder / PREDICTIONS
        if run.predicts:
            predictions.unlink(missing_ok=True)  # of an attempt that was stopped
            best_step = ["--step", "best"] if run.keeps_best else []
            commands.append([*evaluate, "--predictions", str(predictions), *best_step])
        commands += [[*evaluate, *arguments] for arguments in run.evaluations.values()]
        began = time.monotonic()
        (run.folder / "log.txt").unlink(missing_ok=True)
        for arguments in commands:
            self._execution.command(run, arguments, slot)
        write_report([str(run.folder)], run.folder / REPORT, schema=Experiment)
        return _result(run, round(time.monotonic() - began, 1))


def _result(run: Run, seconds: float) -> Result:
    """The result of a finished run, from its metrics.

    Raises:
        SamestepError: the run's score is missing.
    """
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if "heldout/loss" in row]
    row: Row = rows[-1] if rows else {"step": 0}
    if rows and run.keeps_best:  # of equal ones the first, whose checkpoint was kept
        row = max(rows, key=lambda row: ranked(row[f"heldout/{run.score}"]))
    evaluated = [("", row)]
    if run.evaluations:
        # The file may also have evaluations of earlier attempts, before the ones of this attempt.
        last = list(read_rows(run.folder / "scores.jsonl"))[-len(run.evaluations) :]
        evaluated += zip(run.evaluations, last, strict=True)
    scores: dict[str, float] = {}
    for prefix, found in evaluated:
        for name, value in scores_of(found, of_tokens="" in run.evaluations).items():
            is_percentage = name.startswith(PERCENT)
            scores[f"{prefix}{name}"] = value / 100 if is_percentage else value
    if run.score not in scores:
        raise SamestepError(
            f"{run.folder} has no score {run.score!r}. "
            "Name one of objective.metrics in the task's file."
        )
    steps = int(row["step"])
    learned = scores[run.score] > run.learns_above
    identity = (run.task, run.name, run.settings, run.seed, run.digest)
    return Result(*identity, scores, steps, seconds, learned)
