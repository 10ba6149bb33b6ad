"""This machine: `samestep train --elastic` in the background, which goes on when the terminal is closed."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from launch import logs
from launch.environment import Environment
from launch.job import CANCEL, EXIT, LOG, SCRIPT, Cluster, JobSpec, Record, State, Submission
from trainer.errors import ConfigError, LaunchError

_PROC = Path("/proc")


@dataclass(frozen=True)
class Config(Cluster):
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
            raise ConfigError(
                f"processes must be at least 1, not {self.processes}; leave it out for one a GPU"
            )

    @property
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """Those that this machine turns out to have, unless they are named."""
        return (self.processes or "here",)

    @property
    def takes_snapshot(self) -> bool:
        return self.code == "snapshot"

    @property
    def exported(self) -> Mapping[str, str]:
        return self.environment.variables

    def render(self, job: JobSpec) -> Submission:
        """One script: a shell that becomes the command, within one that writes down how it has ended."""
        if job.tasks > 1:
            raise ConfigError(
                "this machine builds a dataset by one job with many processes; leave --tasks out"
            )
        train = [
            "--elastic",
            "1",
            *(["--processes", str(self.processes)] if self.processes else []),
        ]
        more = train if job.action == "train" else []
        write_down = f"echo $? > {shlex.quote(str(job.folder / EXIT))}"
        lines = [
            "#!/bin/bash",
            "# Written by samestep launch.",
            f"trap {shlex.quote(write_down)} EXIT",
        ]
        lines += ["trap : TERM  # which is for the command to heed"]
        lines += [
            'export SAMESTEP_JOB="local-$$"',
            "(",
            f"cd -- {shlex.quote(str(job.directory))} || exit 1",
        ]
        lines += [
            *self.environment.lines(),
            *job.exports(),
            "",
            f"exec {job.shell_command(*more)}",
            ")",
            "code=$?",
        ]
        lines += [
            f"if [ $code = {128 + signal.SIGTERM} ]; then  # before the run could heed it: what sets up ends, too",
            "  trap '' TERM",
            "  kill -- -$$ 2> /dev/null",
            "fi",
            "exit $code",
        ]
        return Submission({SCRIPT: "\n".join(lines) + "\n"}, ("bash", SCRIPT))

    def check(self) -> None:
        """Looks for what tells whether jobs live."""
        if not _stat(os.getpid()):
            raise LaunchError(
                "kind local needs Linux, whose /proc says which jobs live; use samestep train instead"
            )

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
        about = {
            "pid": str(process.pid),
            "started": _started(process.pid),
            "host": socket.gethostname(),
        }
        return f"local-{process.pid}", about

    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """Whether their processes are there, or how they have ended; those of other machines are not seen from here."""
        return {record.id: _state(record) for record in records}

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """What the run says."""
        return logs.read(record.folder, lambda: follow and _state(record).active)

    def cancel(self, record: Record) -> None:
        """The run saves a checkpoint first."""
        state = _state(record)
        if not state.active:
            raise LaunchError(f"{record.id} has ended already")
        if not _is_alive(record):
            raise LaunchError(
                f"{record.id} was started {state.word}, and can be cancelled only there; if that machine is gone, "
                f"remove {record.folder}"
            )
        (record.folder / CANCEL).touch()
        pid = int(record.about["pid"])
        while not (children := _children(pid)) and _is_alive(record):  # it starts, or ends
            time.sleep(0.01)
        for child in children:  # its script lives on, to write down how it has ended
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)


def _state(record: Record) -> State:
    host = record.about.get("host", "another machine")
    if _is_alive(record):
        return State("running", True)
    here = host == socket.gethostname() or record.about.get("started", "").startswith(
        _boot()
    )  # names may change
    if here or (record.folder / EXIT).exists():
        return logs.state_of_ended(record.folder)
    return State(f"on {host}", True)


def _is_alive(record: Record) -> bool:
    return _started(int(record.about.get("pid", 0))) == record.about.get("started", "") != ""


def _started(pid: int) -> str:
    """What tells a process from any other one of its number: which start of the machine, and the clock ticks since.

    Empty where there is none.
    """
    stat = _stat(pid)
    if not stat or stat[0] in "ZX":
        return ""
    return f"{_boot()} {stat[19]}"


def _boot() -> str:
    """What no other start of this machine has, and no other machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _children(pid: int) -> list[int]:
    numbers = [int(place.name) for place in _PROC.glob("[0-9]*")]
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)]]


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process (proc_pid_stat(5)), from its state on; nothing where there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
