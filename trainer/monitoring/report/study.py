"""Progress of the studies in a folder of `samestep study`, from the files in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict, TypeVar

from samestep.config import Tree
from samestep.errors import DataError
from samestep.stored_json import Between, Name, Seconds, damage_of, read_json
from trainer.monitoring.forecast import suite_left
from trainer.monitoring.jsonl import RowReader
from trainer.monitoring.report.status import has_owner, is_inside

STUDY_PLAN = "study.json"
"""File in a study's folder: its jobs, see `PlannedJob`, and the names of those that run."""
PAGE = "index.html"
"""The study's own page, written when its jobs have ended."""
RESULT = "result.json"
"""File of a finished job."""
JOBS = "jobs"
"""Folder beside the studies' own, with the jobs that they share."""
MOST_PAGE_BYTES = 2**25
_METRICS = "metrics.jsonl"

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedJob:
    """A job of a study, in study.json.

    Attributes:
        name: of its folder.
        stage: its name.
        arms: the arms and the seed that it belongs to.
        folder: relative to the study's.
        run: folder in `folder` that is a run, if it has metrics.jsonl.
    """

    name: str
    stage: str
    arms: str
    folder: Name
    run: Name


class _Plan(TypedDict):
    question: str
    slots: Annotated[int, Between(1, 2**20)]
    jobs: list[PlannedJob]
    running: list[str]


class _Usage(TypedDict):
    seconds: Seconds


class _Result(TypedDict):
    usage: _Usage


class StudiesFolder:
    """The folder of a study, or of several: --output of `samestep study`.

    It may be a stranger's. What a study names is only read inside of its own folder and the jobs'.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._metrics: dict[Path, RowReader] = {}
        self._steps: dict[Path, int] = {}

    @property
    def studies(self) -> dict[str, Path]:
        """The folders of the studies by name; none if it is something else."""
        if _is_study(self._folder):
            return {self._folder.name: self._folder}
        folders = sorted(self._folder.glob("*/"))
        return {each.name: each for each in folders if not each.is_symlink() and _is_study(each)}

    def describe(self, links: str | None) -> list[Tree]:
        """The studies, as page.js reads them.

        Args:
            links: what the addresses of their pages begin with; None if they have none.
        """
        return [self._study(name, folder, links) for name, folder in self.studies.items()]

    def _study(self, name: str, folder: Path, links: str | None) -> Tree:
        plan = _read(folder / STUDY_PLAN, _Plan)
        jobs = plan["jobs"]
        # A study that was killed leaves names of jobs, and its lock to the next one.
        names = set(plan["running"]) if has_owner(folder.parent) else set()
        seconds = {job.name: _seconds(folder, job) for job in jobs}
        finished = [job for job in jobs if seconds[job.name] is not None]
        missing = [job for job in jobs if seconds[job.name] is None]
        running = {job.name for job in missing if job.name in names}
        return {
            "name": name,
            "question": plan["question"],
            "path": str(folder),
            "page": f"{links}/{name}" if links is not None and _has_page(folder) else None,
            "finished": len(finished),
            "total": len(jobs),
            "eta": suite_left(
                [(job.stage, 1, seconds[job.name] or 0.0) for job in finished],
                [(job.stage, 1) for job in missing],
                plan["slots"],
            ),
            "running": [_label(job) for job in missing if job.name in running],
            "stages": _stages(jobs, seconds),
            "runs": [
                {
                    "run": _label(job),
                    "state": _state(job, seconds, running),
                    "step": self._step(run / _METRICS),
                    "path": str(run.resolve()),
                    "link": None if links is None else f"{links}/{name}/{job.name}",
                }
                for job in jobs
                if (run := _run(folder, job)) is not None
            ],
        }

    def target(self, address: str) -> tuple[Path, str | None] | None:
        """What a link leads to.

        Args:
            address: the link without `links`, as masking_rate or masking_rate/train-1f2e3d4c5b.

        Returns:
            The page of a study and None, or the folder of a run and the run's name; None if the
            studies have neither.
        """
        name, _, job = address.partition("/")
        folder = self.studies.get(name)
        if folder is None:
            return None
        if not job:
            return (folder / PAGE, None) if _has_page(folder) else None
        for each in _read(folder / STUDY_PLAN, _Plan)["jobs"]:
            if each.name == job and (run := _run(folder, each)) is not None:
                return run, _label(each)
        return None

    def _step(self, file: Path) -> int:
        """The last step in a run's metrics, of which only new rows are read."""
        reader = self._metrics.setdefault(file, RowReader(file))
        for rows, replaced in reader.pieces():
            if rows or replaced:
                self._steps[file] = rows[-1]["step"] if rows else 0
        return self._steps.get(file, 0)


def _is_study(folder: Path) -> bool:
    return _is_in_study(folder, folder / STUDY_PLAN)


def _has_page(folder: Path) -> bool:
    # Not even a link inside: a browser shows the page of a study, and nothing else of it.
    return _is_in_study(folder, folder / PAGE) and not (folder / PAGE).is_symlink()


def _run(folder: Path, job: PlannedJob) -> Path | None:
    """The folder of a job's run, if it has metrics."""
    run = folder / job.folder / job.run
    return run if _is_in_study(folder, run / _METRICS) else None


def _is_in_study(folder: Path, file: Path) -> bool:
    # Links and `..` are no fault by themselves: a job has a link to the run of its suite.
    return is_inside(file, folder, folder.parent / JOBS)


def _label(job: PlannedJob) -> str:
    return f"{job.stage}: {job.arms}"


def _state(job: PlannedJob, seconds: dict[str, float | None], running: set[str]) -> str:
    if seconds[job.name] is not None:
        return "finished"
    return "running" if job.name in running else "stopped"


def _stages(jobs: Sequence[PlannedJob], seconds: dict[str, float | None]) -> list[Tree]:
    found = []
    for stage in dict.fromkeys(job.stage for job in jobs):
        times = [seconds[job.name] for job in jobs if job.stage == stage]
        done = [time for time in times if time is not None]
        found.append(
            {"stage": stage, "finished": len(done), "total": len(times), "seconds": sum(done)}
        )
    return found


def _seconds(folder: Path, job: PlannedJob) -> float | None:
    """The wall time of a finished job."""
    file = folder / job.folder / RESULT
    return _read(file, _Result)["usage"]["seconds"] if _is_in_study(folder, file) else None


def _read(file: Path, schema: type[T]) -> T:
    with damage_of(file, DataError, "Run the study again, or restore it."):
        return read_json(file, schema)
