"""This machine: `samestep train --elastic` in the background, which goes on when the terminal is closed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from launch import logs
from launch.environment import Environment
from launch.job import EXIT, LOG, SCRIPT, JobSpec, Record, State, Submission
from trainer.errors import ConfigError, LaunchError


@dataclass(frozen=True)
class Config:
    """This machine.

    Attributes:
        processes: that train; None takes one a GPU, else one.
        environment: what is set up before the command.
        code: snapshot copies what git knows of the folder that you submit from, which then comes before what is
            installed: you can go on editing. installed takes that alone.
    """

    processes: int | None = None
    environment: Environment = field(default_factory=Environment)
    code: Literal["snapshot", "installed"] = "snapshot"

    shares_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes must be at least 1, not {self.processes}; leave it out for one a GPU")

    @property
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """Those that this machine turns out to have, unless they are named."""
        return (self.processes or "here",)

    def render(self, job: JobSpec) -> Submission:
        """One script."""
        train = ["--elastic", "1", *(["--processes", str(self.processes)] if self.processes else [])]
        more = train if job.action == "train" else []
        lines = ["#!/bin/bash", "# Written by samestep launch.", f"cd -- {shlex.quote(str(job.directory))} || exit 1"]
        lines += [*self.environment.lines(), *job.exports(), 'export SAMESTEP_JOB="local-$$"', ""]
        lines += [
            job.shell_command(*more),
            "code=$?",
            f"echo $code > {shlex.quote(str(job.folder / EXIT))}",
            "exit $code",
        ]
        return Submission({SCRIPT: "\n".join(lines) + "\n"}, ("bash", SCRIPT))

    def check(self) -> None:
        """There is nothing that could be missing."""

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Starts it in a session of its own."""
        with (folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                submission.command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return f"local-{process.pid}", {"pid": str(process.pid), "started": _started(process.pid)}

    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """Whether their processes are there, or how they have ended."""
        return {
            record.id: State("running", True) if _is_alive(record) else logs.state_of_ended(record.folder)
            for record in records
        }

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """What the run says."""
        return logs.read(record.folder, lambda: follow and _is_alive(record))

    def cancel(self, record: Record) -> None:
        """The run saves a checkpoint first."""
        if not _is_alive(record):
            raise LaunchError(f"{record.id} has ended already")
        for pid in _children(int(record.about["pid"])):  # its script lives on, to write down how it has ended
            os.kill(pid, signal.SIGTERM)


def _is_alive(record: Record) -> bool:
    return _started(int(record.about["pid"])) == record.about["started"] != ""


def _started(pid: int) -> str:
    """When a process was started, which tells it from a later one of the same number; empty where there is none."""
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    state, _, started = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else started.strip()


def _children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(child) for child in done.stdout.split()]
