"""This machine: `samestep train --elastic` in the background, which survives a closed terminal."""

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
from launch.settings import check_least, check_sigterm
from samestep.errors import ConfigError, LaunchError

_PROC = Path("/proc")


@dataclass(frozen=True)
class Config(Cluster):
    """This machine.

    Attributes:
        processes: number of training processes; None starts one for each GPU, or one without GPUs.
        environment: the set-up before the command.
        code: snapshot copies the files that git knows in the folder that you submit from, and
            prefers them to the installed package, so you can go on editing; installed takes the
            package alone.
    """

    processes: int | None = None
    environment: Environment = field(default_factory=Environment)
    code: Literal["snapshot", "installed"] = "snapshot"

    shares_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_least(self, processes=1)

    @property
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """The devices of this machine, unless `processes` is set."""
        return (self.processes or "here",)

    @property
    def hardware(self) -> Literal["gpu", "tpu", "cpu", "here"]:
        return "here"

    @property
    def size(self) -> str:
        """This machine, with its processes if their number is set."""
        if self.processes is None:
            return "this machine"
        return f"this machine x {self.processes} process{'es' if self.processes > 1 else ''}"

    def render(self, job: JobSpec) -> Submission:
        """A script: a subshell becomes the command, and the shell writes its exit code."""
        if job.tasks > 1:
            raise ConfigError(
                "this machine builds a dataset in one job with many processes. Remove --tasks."
            )
        check_sigterm(job, "samestep cancel")
        arguments: list[str] = []
        if job.action == "train":
            arguments = ["--elastic", "1"]
            if self.processes:
                arguments += ["--processes", str(self.processes)]
        write_exit = f"echo $? > {shlex.quote(str(job.folder / EXIT))}"
        lines = [
            "#!/bin/bash",
            "# Written by samestep launch, which sends the output to",
            f"# {str(job.folder / LOG)!r}.",
            f"trap {shlex.quote(write_exit)} EXIT",
            "trap : TERM  # the command handles it",
            'export SAMESTEP_JOB="local-$$"',
            "(",
            f"cd -- {shlex.quote(str(job.directory))} || exit 1",
            *self.environment.lines(),
            *job.exports(),
            "",
            f"exec {job.shell_command(*arguments)}",
            ")",
        ]
        return Submission({SCRIPT: "\n".join(lines) + "\n"}, ("bash", SCRIPT))

    def check(self) -> None:
        """Checks for /proc, which says which processes live."""
        if not _stat(os.getpid()):
            raise LaunchError(
                "kind local needs Linux, whose /proc says which jobs live. Use samestep train "
                "instead."
            )

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Starts the script in a new session."""
        # A session of its own gets no signals from this terminal.
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

    def states(self, records: Iterable[Record]) -> Mapping[Path, State]:
        """From the process, or the exit code; jobs of other machines are not visible from here."""
        return {record.folder: _state(record) for record in records}

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """The output of the run."""
        return logs.read(record.folder, lambda: follow and self.is_active(record))

    def cancel(self, record: Record) -> None:
        """The run saves a checkpoint first."""
        state = _state(record)
        if not state.active:
            raise LaunchError(f"job {record.id} has ended already: there is nothing to cancel.")
        if not _is_alive(record):
            raise LaunchError(
                f"{record.id} was started {state.word}, and can be cancelled only there. If that "
                f"machine is gone, remove {record.folder}."
            )
        (record.folder / CANCEL).touch()
        pid = int(record.about["pid"])
        while not (children := _children(pid)) and _is_alive(record):  # it is starting or ending
            time.sleep(0.01)
        # Signal the command only: the script must live to write its exit code.
        for child in children:
            _terminate(child, pid)


def _terminate(child: int, script: int) -> None:
    """Sends SIGTERM to the child of a script: the command, or the shell that will become it.

    A shell is ended with all that the set-up has started, by SIGKILL after a second.
    """
    # A shell that has just been forked loses a signal, so it is sent until there is an end. The
    # command gets one: its second would stop a run without a checkpoint.
    of_shell = _arguments(script)
    while _started(child):
        is_shell = _arguments(child) in (of_shell, b"")  # nothing of one that ends just now
        _send(child, signal.SIGTERM)
        if not is_shell:
            return
        time.sleep(0.01)
    ended = time.monotonic()
    while (started := _session(script) - {script}) and time.monotonic() < ended + 10:
        for pid in started:
            _send(pid, signal.SIGTERM if time.monotonic() < ended + 1 else signal.SIGKILL)
        time.sleep(0.01)


def _send(pid: int, sent: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sent)


def _state(record: Record) -> State:
    host = record.about.get("host", "another machine")
    if _is_alive(record):
        return State("running", True)
    # A machine's name may change, but not the id of its boot.
    is_here = host == socket.gethostname() or record.about.get("started", "").startswith(_boot())
    if is_here or (record.folder / EXIT).exists():
        return logs.state_of_ended(record.folder)
    return State(f"on {host}", True)


def _is_alive(record: Record) -> bool:
    return _started(int(record.about.get("pid", 0))) == record.about.get("started", "") != ""


def _started(pid: int) -> str:
    """Identifies a process among others of its pid: boot id and start in clock ticks since then.

    Empty if there is no such process.
    """
    stat = _stat(pid)
    if not stat or stat[0] in "ZX":  # zombie or dead
        return ""
    return f"{_boot()} {stat[19]}"


def _boot() -> str:
    """The id of this boot of this machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _children(pid: int) -> list[int]:
    return [number for number, stat in _stats().items() if stat[1] == str(pid)]


def _session(leader: int) -> set[int]:
    """The processes of a session that live."""
    return {
        number
        for number, stat in _stats().items()
        if stat[3] == str(leader) and stat[0] not in "ZX"
    }


def _stats() -> dict[int, list[str]]:
    numbers = [int(place.name) for place in _PROC.glob("[0-9]*")]
    return {number: stat for number in numbers if (stat := _stat(number))}


def _arguments(pid: int) -> bytes:
    """A process's command line; a forked shell has its parent's until it runs a command."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc_pid_stat(5)); empty without the process."""
    try:
        # The name before the state is in parentheses, and may hold anything.
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
