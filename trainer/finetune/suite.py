"""Makes the runs of a suite, each as `samestep train` in a process of its own, and keeps their results."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from trainer.errors import EXIT_DONE, SamestepError
from trainer.finetune.runs import Run
from trainer.metrics.texts import PERCENT
from trainer.monitoring.jsonl import read_rows
from trainer.storage import write_text

_RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Attributes:
        task, run, settings, seed, digest: of the `Run`, by its name.
        scores: of the held-out rows at its end, by name.
        steps: optimizer steps.
        seconds: that it took, without what ran before an interruption.
    """

    task: str
    run: str
    settings: Mapping[str, float]
    seed: int
    digest: str
    scores: Mapping[str, float]
    steps: int
    seconds: float


def read_results(folder: Path) -> dict[str, Result]:
    """The results so far, by the digests of their runs."""
    file = folder / _RESULTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {result.digest: result for result in (Result(**json.loads(line)) for line in lines)}


class Suite:
    """A folder of runs and their results.

    Args:
        folder: which.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: set[subprocess.Popen[bytes]] = set()

    def make(
        self, runs: Sequence[Run], slots: Sequence[Mapping[str, str]], tell: Callable[[Run, Result | None], None]
    ) -> list[str]:
        """Makes runs, as many at a time as there are slots.

        Args:
            runs: that have no result yet.
            slots: environment variables of the processes, each a device's.
            tell: is told of every run, with its result; None says that it begins.

        Returns:
            What went wrong with which run.
        """
        free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for slot in slots:
            free.put(slot)

        def train(run: Run) -> Result:
            slot = free.get()
            tell(run, None)
            try:
                return self._train(run, slot)
            finally:
                free.put(slot)

        problems = []
        with ThreadPoolExecutor(len(slots)) as pool:
            futures = {pool.submit(train, run): run for run in runs}
            try:
                for future in as_completed(futures):
                    try:
                        result = future.result()
                    except SamestepError as error:
                        problems.append(str(error))
                        continue
                    self._keep([*read_results(self._folder).values(), result])
                    tell(futures[future], result)
            except BaseException:
                for future in futures:
                    future.cancel()
                for process in list(self._processes):
                    process.terminate()  # it saves a checkpoint to go on from
                raise
        return problems

    def _keep(self, results: Iterable[Result]) -> None:
        lines = (json.dumps(asdict(result)) + "\n" for result in results)
        write_text(self._folder / _RESULTS, "".join(lines))

    def _train(self, run: Run, environment: Mapping[str, str]) -> Result:
        run.folder.mkdir(parents=True, exist_ok=True)
        file, log = run.folder / "experiment.yaml", run.folder / "log.txt"
        write_text(file, yaml.safe_dump(dict(run.experiment), sort_keys=False))
        began = time.monotonic()
        with log.open("wb") as output:
            self._samestep(run, ["train", str(file), "--processes", "1"], environment, output)
            for arguments in run.evaluations.values():
                self._samestep(run, ["evaluate", str(run.folder), "--processes", "1", *arguments], environment, output)
        return _result(run, time.monotonic() - began)

    def _samestep(self, run: Run, arguments: list[str], environment: Mapping[str, str], output: BinaryIO) -> None:
        """Runs a command of a run, which says what it says in its log.

        Raises:
            SamestepError: it fails.
        """
        command = [sys.executable, "-m", "trainer.cli", *arguments]
        if setpriv := shutil.which("setpriv"):  # a suite that is killed takes what it has started with it
            command = [setpriv, "--pdeathsig", "TERM", *command]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
        self._processes.add(process)
        code = process.wait()
        self._processes.remove(process)
        if code != EXIT_DONE:
            log = Path(output.name)
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1] if lines else "it said nothing"
            raise SamestepError(f"{run.folder} ended with exit code {code}: {said} (see {log})")


def _result(run: Run, seconds: float) -> Result:
    """What the metrics of a run that is over say.

    Raises:
        SamestepError: they lack its score.
    """
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if "heldout/loss" in row]
    scores = _scores(rows[-1]) if rows and "" not in run.evaluations else {}  # there, accuracy is of tokens
    evaluated = list(read_rows(run.folder / "scores.jsonl"))[-len(run.evaluations) :] if run.evaluations else []
    for prefix, row in zip(run.evaluations, evaluated, strict=True):
        scores |= {f"{prefix}{name}": value for name, value in _scores(row).items()}
    if run.score not in scores:
        raise SamestepError(
            f"{run.folder} has no score {run.score!r}; name one of objective.metrics in the task's file"
        )
    return Result(
        run.task, run.name, run.settings, run.seed, run.digest, scores, int(rows[-1]["step"]), round(seconds, 1)
    )


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a row of metrics.jsonl or scores.jsonl, as shares of the whole."""
    parts = ((*name.partition("/"), value) for name, value in row.items())
    return {
        name: value / 100 if group == "generated" and name.startswith(PERCENT) else value
        for group, _, name, value in parts
        if group in ("heldout", "generated")
    }
