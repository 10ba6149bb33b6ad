"""Makes the runs of a suite, each as `samestep train` in a process of its own, and keeps their
results.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import yaml

from trainer.checkpoint import integrity
from trainer.config import Tree
from trainer.errors import EXIT_DONE, SamestepError
from trainer.finetune.runs import Run
from trainer.metrics.texts import PERCENT
from trainer.monitoring.jsonl import read_rows, scores_of
from trainer.storage import write_text

_RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Attributes:
        task, run, settings, seed, digest: of the `Run`, by its name.
        scores: of the held-out rows by name, at its end or, where it is evaluated several times,
            when they were best.
        steps: optimizer steps by then.
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
        runs: those that there are to be.
        keep: whether all finished runs keep their checkpoints, rather than the best one of each
            task alone.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], keep: bool = False) -> None:
        self._folder, self._runs, self._keep_all = folder, runs, keep
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._made: set[str] = set()
        self._stopped = False

    def missing(self) -> list[Run]:
        """The runs without a result, and those that they are to start from but whose checkpoints
        are gone.
        """
        results = read_results(self._folder)
        missing = [run for run in self._runs if run.digest not in results]
        starts = {run.start for run in missing if run.start and results.keys() >= set(run.start)}
        best = {self._best(start, results).digest for start in starts}
        return [
            run
            for run in self._runs
            if run in missing or (run.digest in best and not _has_checkpoint(run))
        ]

    def make(
        self, slots: Sequence[Mapping[str, str]], tell: Callable[[Run, Result | None], None]
    ) -> list[str]:
        """Makes the missing runs, as many at a time as there are slots.

        Args:
            slots: environment variables of the processes, each a device's.
            tell: called with each run and its result; with None when the run starts.

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

        problems, waiting, futures = [], self.missing(), dict[Future[Result], Run]()
        self._made = {run.digest for run in self._runs} - {run.digest for run in waiting}
        self._tidy()
        with ThreadPoolExecutor(len(slots)) as pool:
            try:
                while True:
                    unmade = {run.digest for run in (*waiting, *futures.values())}
                    results = read_results(self._folder).keys() - unmade
                    ready = [run for run in waiting if results >= set(run.start)]
                    waiting = [run for run in waiting if run not in ready]
                    futures |= {pool.submit(train, run): run for run in ready}
                    if not futures:
                        break
                    for future in wait(futures, return_when=FIRST_COMPLETED).done:
                        run = futures.pop(future)
                        try:
                            result = future.result()
                        except SamestepError as error:
                            problems.append(str(error))
                            continue
                        self._keep([*read_results(self._folder).values(), result])
                        self._made.add(run.digest)
                        self._tidy()
                        tell(run, result)
            except BaseException:
                self._stopped = True
                for future in futures:
                    future.cancel()
                for process in list(self._processes):
                    process.terminate()  # it saves a checkpoint to go on from
                raise
        return problems + [
            f"{run.folder} was not made: a run that it may start from has failed" for run in waiting
        ]

    def _best(self, digests: Collection[str], results: Mapping[str, Result]) -> Run:
        """Of finished runs, the one with the best score; of equal ones, the first."""
        finished = [run for run in self._runs if run.digest in digests]
        return max(finished, key=lambda run: results[run.digest].scores[run.score])

    def _tidy(self) -> None:
        """Removes the checkpoints of finished runs, but for the best one's of each task."""
        results = read_results(self._folder)
        groups: dict[tuple[str, bool], list[Run]] = {}
        for run in self._runs:
            if run.digest in results and run.digest in self._made:
                groups.setdefault((run.task, run.scratch), []).append(run)
        for finished in () if self._keep_all else groups.values():
            best = self._best([run.digest for run in finished], results)
            for run in finished:
                if run is not best:
                    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)

    def _keep(self, results: Iterable[Result]) -> None:
        lines = (json.dumps(asdict(result)) + "\n" for result in results)
        write_text(self._folder / _RESULTS, "".join(lines))

    def _train(self, run: Run, environment: Mapping[str, str]) -> Result:
        run.folder.mkdir(parents=True, exist_ok=True)
        file, log = run.folder / "experiment.yaml", run.folder / "log.txt"
        write_text(file, yaml.safe_dump(self._experiment(run), sort_keys=False))
        began = time.monotonic()
        with log.open("wb") as output:
            self._samestep(run, ["train", str(file), "--processes", "1"], environment, output)
            for arguments in run.evaluations.values():
                self._samestep(
                    run,
                    ["evaluate", str(run.folder), "--processes", "1", *arguments],
                    environment,
                    output,
                )
        return _result(run, time.monotonic() - began)

    def _samestep(
        self, run: Run, arguments: list[str], environment: Mapping[str, str], output: BinaryIO
    ) -> None:
        """Runs a command of a run, which says what it says in its log.

        Raises:
            SamestepError: it fails.
        """
        if self._stopped:
            raise SamestepError(f"{run.folder} was stopped; run the same command again")
        command = [sys.executable, "-m", "trainer.cli", *arguments]
        if setpriv := shutil.which(
            "setpriv"
        ):  # a suite that is killed takes what it has started with it
            command = [setpriv, "--pdeathsig", "TERM", *command]
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output
        )
        self._processes.add(process)
        code = process.wait()
        self._processes.remove(process)
        if code != EXIT_DONE:
            log = Path(output.name)
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1] if lines else "it said nothing"
            raise SamestepError(f"{run.folder} ended with exit code {code}: {said} (see {log})")

    def _experiment(self, run: Run) -> Tree:
        if not run.start:
            return run.experiment
        best = self._best(run.start, read_results(self._folder))
        if not _has_checkpoint(best):
            raise SamestepError(
                f"{best.folder}, to start from, has no checkpoint any more; run the same command "
                "again"
            )
        return {**run.experiment, "init_from": best.weights}


def _has_checkpoint(run: Run) -> bool:
    return bool(integrity.committed_steps(run.folder / "checkpoints"))


def _result(run: Run, seconds: float) -> Result:
    """What the metrics of a run that is over say.

    Raises:
        SamestepError: they lack its score.
    """
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if "heldout/loss" in row]
    row = rows[-1] if rows else {"step": 0}
    if run.experiment["training"].get("best"):  # which of equal ones is the first
        row = max(rows, key=lambda row: row[f"heldout/{run.score}"], default=row)
    of_tokens = "" in run.evaluations
    scores = _as_shares(scores_of(row, of_tokens))
    evaluated = (
        list(read_rows(run.folder / "scores.jsonl"))[-len(run.evaluations) :]
        if run.evaluations
        else []
    )
    for prefix, row in zip(run.evaluations, evaluated, strict=True):
        scores |= {
            f"{prefix}{name}": value
            for name, value in _as_shares(scores_of(row, of_tokens)).items()
        }
    if run.score not in scores:
        raise SamestepError(
            f"{run.folder} has no score {run.score!r}; name one of objective.metrics in the task's "
            "file"
        )
    return Result(
        run.task,
        run.name,
        run.settings,
        run.seed,
        run.digest,
        scores,
        int(row["step"]),
        round(seconds, 1),
    )


def _as_shares(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores as shares of the whole, where they are percentages."""
    return {
        name: value / 100 if name.startswith(PERCENT) else value for name, value in scores.items()
    }
