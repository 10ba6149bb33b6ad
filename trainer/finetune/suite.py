"""Runs tasks x settings x seeds from one checkpoint, each as `samestep train` in a process of its own, resumable."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from data_pipeline import tokenization
from data_pipeline.build import Config as BuildConfig
from data_pipeline.build import build
from data_pipeline.dataset import Dataset, PackedSplit
from trainer.config import Tree, to_tree
from trainer.config.tree import merge, parse_override
from trainer.errors import EXIT_DONE, ConfigError, SamestepError
from trainer.finetune.chance import chance
from trainer.finetune.task import Task
from trainer.monitoring.jsonl import read_rows
from trainer.storage import write_text
from trainer.weights import load_weights

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
_DEFAULTS: Tree = {
    "training": {"global_batch_size": 32, "log_every": 50},
    "optimizer": {"kind": "adamw", "lr": 3e-5},
    "schedule": {"decay": "linear"},
    "strategy": {"kind": "single"},
}


@dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Attributes:
        task: its name.
        name: of its folder under that of the task.
        settings: what the grid chose.
        seed: of the head's weights, the order of the rows and dropout.
        experiment: all its settings.
        score: the metric that it is compared by.
        chance: what that is for a model that always says the same.
    """

    task: str
    name: str
    settings: Mapping[str, float]
    seed: int
    experiment: Tree
    score: str
    chance: float

    @property
    def digest(self) -> str:
        """Of everything that its result depends on, but for the code."""
        return hashlib.sha256(json.dumps(self.experiment, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Attributes:
        task, run, settings, seed, digest: of the `Run`.
        scores: of the held-out rows at its end, by name.
        degenerate: whether it is no better than chance, as some runs of small tasks are (Mosbach et al. 2021).
        steps: optimizer steps.
        seconds: that it took, without what ran before an interruption.
    """

    task: str
    run: str
    settings: Mapping[str, float]
    seed: int
    digest: str
    scores: Mapping[str, float]
    degenerate: bool
    steps: int
    seconds: float


def read_results(folder: Path) -> list[Result]:
    """The results so far."""
    file = folder / RESULTS
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


class Suite:
    """Fine-tunings of one checkpoint.

    Args:
        checkpoint: what they start from; see `load_weights`.
        tasks: what they are of.
        folder: where everything goes: datasets, runs, results.
        seeds: how many of them, from 0.
        whole_grid: whether every point of the tasks' grids is tried.
        overrides: settings of all runs, as on the command line.
    """

    def __init__(
        self,
        checkpoint: str,
        tasks: Sequence[Task],
        folder: Path,
        seeds: int,
        whole_grid: bool = False,
        overrides: Sequence[str] = (),
    ) -> None:
        if seeds < 1:
            raise ConfigError(f"--seeds must be at least 1, not {seeds}")
        self._checkpoint, self._tasks, self.folder = checkpoint, tasks, folder
        self._seeds, self._whole_grid, self._overrides = seeds, whole_grid, overrides
        self._processes: set[subprocess.Popen[bytes]] = set()

    def runs(self) -> list[Run]:
        """Builds the datasets that are not there yet and lists the runs.

        Raises:
            CheckpointError: there is nothing to start from.
            DataError: the rows of a task cannot be read.
        """
        weights = load_weights(self._checkpoint)
        found = []
        with weights.tokenizer_files() as tokenizer:
            for task in self._tasks:
                output = self.folder / "data" / task.name
                config = BuildConfig(task.config.source, tokenization.Config(str(tokenizer)), str(output))
                build(config)
                found += list(self._runs_of(task, Dataset.open(output)))
        return found

    def _runs_of(self, task: Task, dataset: Dataset) -> Iterator[Run]:
        config = task.config
        objective = config.objective.build(dataset.tokenizer.vocabulary)
        spec = objective.pack_spec(config.sequence_length)
        examples = int(PackedSplit(dataset, "train", spec, "padded", seed=0).counts.sum())
        baseline = chance(objective, dataset, config.score)
        grid = config.grid if self._whole_grid else {name: values[:1] for name, values in config.grid.items()}
        for point, seed in itertools.product(itertools.product(*grid.values()), range(self._seeds)):
            settings = dict(zip(grid, point, strict=True))
            name = "-".join(
                [*(f"{key.rpartition('.')[2]}-{value:g}" for key, value in settings.items()), f"seed-{seed}"]
            )
            tree = merge(_DEFAULTS, task.experiment)
            for setting in [*(f"{key}={value:g}" for key, value in settings.items()), *self._overrides]:
                tree = merge(tree, parse_override(setting))
            steps = math.ceil(examples * config.epochs / tree["training"]["global_batch_size"])
            given: Tree = {
                "output": str(self.folder / "runs" / task.name / name),
                "init_from": self._checkpoint,
                "objective": to_tree(task.config)["objective"],
                "data": {"path": str(dataset.path), "sequence_length": config.sequence_length, "packing": "padded"},
                "training": {"steps": steps, "evaluate_every": steps},
                "schedule": {"warmup_steps": int(config.warmup * steps)},
                "seed": seed,
            }
            yield Run(task.name, name, settings, seed, merge(given, tree), config.score, baseline)

    def missing(self) -> list[Run]:
        """The runs that have no result yet."""
        done = {(result.task, result.run, result.digest) for result in read_results(self.folder)}
        return [run for run in self.runs() if (run.task, run.name, run.digest) not in done]

    def run(
        self, runs: Sequence[Run], slots: Sequence[Mapping[str, str]], tell: Callable[[Run, Result | None], None]
    ) -> list[str]:
        """Makes runs, as many at a time as there are slots.

        Args:
            runs: as `missing` lists them.
            slots: environment variables of the processes, each a device's.
            tell: is told of every run, with its result; None says that it begins.

        Returns:
            What went wrong with which run.
        """
        free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for slot in slots:
            free.put(slot)

        def make(run: Run) -> Result:
            slot = free.get()
            tell(run, None)
            try:
                return self._train(run, slot)
            finally:
                free.put(slot)

        problems = []
        with ThreadPoolExecutor(len(slots)) as pool:
            futures = {pool.submit(make, run): run for run in runs}
            try:
                for future in as_completed(futures):
                    run = futures[future]
                    try:
                        result = future.result()
                    except SamestepError as error:
                        problems.append(str(error))
                        continue
                    results = [*read_results(self.folder), result]
                    write_text(self.folder / RESULTS, "".join(json.dumps(asdict(each)) + "\n" for each in results))
                    tell(run, result)
            except BaseException:
                for future in futures:
                    future.cancel()
                for process in list(self._processes):
                    process.terminate()  # it saves a checkpoint to go on from
                raise
        return problems

    def _train(self, run: Run, environment: Mapping[str, str]) -> Result:
        folder = Path(run.experiment["output"])
        folder.mkdir(parents=True, exist_ok=True)
        file, log = folder / "experiment.yaml", folder / "log.txt"
        write_text(file, yaml.safe_dump(dict(run.experiment), sort_keys=False))
        began = time.monotonic()
        command = [sys.executable, "-m", "trainer.cli", "train", str(file), "--processes", "1"]
        with log.open("ab") as output:
            process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
        self._processes.add(process)
        code = process.wait()
        self._processes.remove(process)
        if code != EXIT_DONE:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1] if lines else "it said nothing"
            raise SamestepError(f"{folder} ended with exit code {code}: {said} (see {log})")
        return _result(run, time.monotonic() - began)


def _result(run: Run, seconds: float) -> Result:
    """What the metrics of a run that is over say.

    Raises:
        SamestepError: they lack its score.
    """
    folder = Path(run.experiment["output"])
    rows: list[dict[str, Any]] = [row for row in read_rows(folder / "metrics.jsonl") if f"heldout/{run.score}" in row]
    if not rows:
        raise SamestepError(f"{folder} has no score {run.score!r}; name one of objective.metrics in the task's file")
    last = rows[-1]
    scores = {name.removeprefix("heldout/"): value for name, value in last.items() if name.startswith("heldout/")}
    return Result(
        task=run.task,
        run=run.name,
        settings=run.settings,
        seed=run.seed,
        digest=run.digest,
        scores=scores,
        degenerate=scores[run.score] <= run.chance + 1e-6,
        steps=int(last["step"]),
        seconds=round(seconds, 1),
    )
