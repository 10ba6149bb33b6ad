"""Executes the jobs of a study that have no result yet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock

from samestep.storage import write_text
from trainer.monitoring.costs import CpuEnergy, total
from trainer.monitoring.jsonl import read_rows
from trainer.monitoring.report.study import STUDY_PLAN, PlannedJob
from trainer.studies.execution import Execution, Slot
from trainer.studies.jobs import Job, Jobs, Result


def execute(
    jobs: Jobs,
    slots: Sequence[Slot],
    tell: Callable[[Job, Result | None], None],
    plan: Plan,
) -> list[str]:
    """Executes the jobs that are not finished, and those that they need.

    Args:
        slots: one for each job that runs at a time.
        tell: called with a job and None when it starts, and with its result when it ends.
        plan: shows the progress to `samestep watch`.

    Returns:
        An error message for each job that failed.
    """

    def work(job: Job, slot: Slot) -> Result:
        plan.begins(job)
        try:
            return attempt(job, slot)
        finally:
            plan.ends(job)

    def attempt(job: Job, slot: Slot) -> Result:
        job.folder.mkdir(parents=True, exist_ok=True)
        settings = job.settings()
        described = {"stage": job.stage, "seed": job.seed, "settings": settings}
        write_text(job.folder / "job.json", json.dumps(described, indent=1) + "\n")
        (job.folder / "log.txt").unlink(missing_ok=True)
        with CpuEnergy() as energy:
            usages = [
                execution.command(job, arguments, slot)
                for arguments in job.config.commands(job.folder, job.seed, settings)
            ]
            job.config.finish(job.folder)
            joules = energy.joules()
        rows = list(read_rows(job.folder / job.config.product / "metrics.jsonl"))
        usage = replace(
            total(usages),
            device_joules=sum(row.get("perf/energy_joules", 0.0) for row in rows),
            # Counters are of the whole machine, which the other slots use as well.
            cpu_joules=None if joules is None else joules / len(slots),
        )
        flops = max((row.get("train/flops", 0.0) for row in rows), default=0.0)
        result = Result(job.config.scores(job.folder), usage, flops)
        result.save(job.folder)
        return result

    execution: Execution[Job, Result] = Execution(slots, work, tell)
    return execution.run(missing(jobs))


class Plan:
    """study.json in a study's folder, from which `samestep watch` shows its progress.

    Args:
        folder: of the study.
        question: that it answers.
        slots: number of jobs at a time.
    """

    def __init__(self, folder: Path, question: str, jobs: Jobs, slots: int) -> None:
        self._file = folder / STUDY_PLAN
        arms = arms_of(jobs)
        planned = [
            PlannedJob(
                job.name,
                job.stage,
                arms[job.digest],
                os.path.relpath(job.folder, folder),
                job.config.product,
            )
            for job in jobs.all
        ]
        self._tree = {
            "question": question,
            "slots": slots,
            "jobs": [asdict(job) for job in planned],
        }
        self._running: set[str] = set()
        self._lock = Lock()  # each slot has a thread
        self._write()

    def begins(self, job: Job) -> None:
        with self._lock:
            self._running.add(job.name)
            self._write()

    def ends(self, job: Job) -> None:
        with self._lock:
            self._running.discard(job.name)
            self._write()

    def _write(self) -> None:
        tree = {**self._tree, "running": sorted(self._running)}
        write_text(self._file, json.dumps(tree, indent=1) + "\n")


def missing(jobs: Jobs) -> list[Job]:
    """The jobs without a result, each after those that it needs."""
    return [job for job in jobs.all if job.result() is None]


def arms_of(jobs: Jobs) -> Mapping[str, str]:
    """Describes each job by the arms and the repetition that use it first, by digest."""
    arms: dict[str, list[str]] = {}
    seeds: dict[str, int] = {}
    for (arm, seed, _), job in jobs.of.items():
        used = arms.setdefault(job.digest, [])
        seeds.setdefault(job.digest, seed)
        if arm not in used:
            used.append(arm)
    count = len({arm for arm, *_ in jobs.of})
    names = {
        digest: "all arms" if len(used) == count > 1 else ", ".join(used)
        for digest, used in arms.items()
    }
    return {digest: f"{name}, seed {seeds[digest]}" for digest, name in names.items()}
