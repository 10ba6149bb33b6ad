"""Executes jobs that depend on each other, as many at a time as there are devices.

A job is a sequence of samestep commands. Each command is a separate process, so that a job that
runs out of memory or hangs cannot harm the others, and its CPU time can be measured.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol, TypeAlias, TypeVar

from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError, SamestepError
from samestep.progress import Progress, ends_in
from trainer.monitoring.costs import Usage
from trainer.monitoring.forecast import Range

logger = logging.getLogger(__name__)

_LAST_BYTES = 4096  # of a log, for its last line
_QUIET = 60.0  # seconds in which no job has ended; then the logs of those that run are quoted

Slot: TypeAlias = Mapping[str, str]
"""Environment variables of the processes that use one device."""


class Job(Protocol):
    """Something to execute once.

    Attributes:
        digest: names the job and everything that its result depends on.
        folder: of its log, and of all other files that it writes.
        after: digests of the jobs that must be finished before.
    """

    @property
    def digest(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def after(self) -> Sequence[str]: ...


J = TypeVar("J", bound=Job)
R = TypeVar("R")


class Execution(Generic[J, R]):
    """Executes jobs, each in one slot.

    Args:
        slots: one for each job that runs at a time.
        work: executes a job with `command`, and returns its result.
        tell: called with a job and None when it starts, and with its result when it ends.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        work: Callable[[J, Slot], R],
        tell: Callable[[J, R | None], None],
    ) -> None:
        self._slots, self._work, self._tell = slots, work, tell
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()  # a process is stopped by `run` or by `command`, once

    def run(self, jobs: Sequence[J]) -> list[str]:
        """Executes jobs, each when those before it are finished.

        A job that is not among `jobs` counts as finished.

        Returns:
            An error message for each job that failed.
        """
        problems: list[str] = []
        free, waiting = list(self._slots), list(jobs)
        unfinished = {job.digest for job in jobs}
        running: dict[Future[R], tuple[J, Slot]] = {}
        with ThreadPoolExecutor(len(self._slots)) as pool:
            try:
                while True:
                    # A failed job stays unfinished, so jobs after it are never ready.
                    ready = [job for job in waiting if unfinished.isdisjoint(job.after)]
                    # With 2 GPUs and 3 jobs that are ready, the third waits for the next round.
                    for job in ready[: len(free)]:
                        slot = free.pop(0)
                        waiting.remove(job)
                        self._tell(job, None)
                        running[pool.submit(self._work, job, slot)] = job, slot
                    if not running:
                        break
                    done = wait(running, timeout=_QUIET, return_when=FIRST_COMPLETED).done
                    if not done:
                        for job, _ in running.values():
                            logger.info("%s: %s", job.folder, _last_line(job.folder / "log.txt"))
                    for future in done:
                        job, slot = running.pop(future)
                        free.append(slot)
                        try:
                            result = future.result()
                        except SamestepError as error:
                            # Now and in the end: the other jobs may take hours.
                            logger.error("%s; the other jobs run on", error)
                            problems.append(str(error))
                            continue
                        except Exception as error:  # a defect; the other jobs run on
                            logger.exception("%s", job.folder)
                            problems.append(f"{job.folder}: {type(error).__name__}: {error}")
                            continue
                        unfinished.discard(job.digest)
                        self._tell(job, result)
            except BaseException:
                # No new process may start from here on. SIGTERM makes those that run save a
                # checkpoint, from which the same command resumes.
                with self._lock:
                    self._stopped = True
                    started = list(self._processes)
                for process in started:
                    # Not process.terminate(): it may take the exit status that wait4 waits for.
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)
                raise
        return problems + [
            f"{job.folder} was not started: a run that it may start from has failed"
            for job in waiting
        ]

    def command(self, job: J, arguments: Sequence[str], slot: Slot) -> Usage:
        """Runs a samestep command, with its output in the job's log.txt.

        Returns:
            Resources that the process and all its children have used.

        Raises:
            SamestepError: it failed, or `run` is being stopped.
        """
        # Between two commands of a job no process runs that an interruption could stop.
        if self._stopped:
            raise SamestepError(f"{job.folder} was stopped; run the same command again")
        # -P: a folder trainer/ in the working folder is a user's own.
        command = [sys.executable, "-P", "-m", "samestep.cli", *arguments]
        if setpriv := shutil.which("setpriv"):
            # If this process is killed, its children end with it, or they would hold devices.
            command = [setpriv, "--pdeathsig", "TERM", *command]
        log = job.folder / "log.txt"
        began = time.monotonic()
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **slot}, stdout=output, stderr=output
            )
        with self._lock:
            self._processes.add(process)
            stopped = self._stopped
        if stopped:  # since the check above
            os.kill(process.pid, signal.SIGTERM)
        # Unlike Popen.wait, wait4 also returns the times of the process and its children.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        self._processes.remove(process)
        if code != EXIT_DONE:
            reason = _last_line(log)
            raise SamestepError(f"{job.folder} ended with exit code {code}: {reason} (see {log})")
        return Usage(time.monotonic() - began, used.ru_utime + used.ru_stime)


def _last_line(log: Path) -> str:
    """The last line of a job's log, which may not exist yet."""
    with suppress(FileNotFoundError):
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"
    return "no output"


def slots(parallel: int | None, on_cpu: bool) -> list[Slot]:
    """Returns slots that share this machine: each sees one of its GPUs, if there are any.

    Args:
        parallel: number of slots; None is one for each GPU, or one.
        on_cpu: leave the GPUs alone.
    """
    from trainer.accelerators import detect
    from trainer.accelerators.kinds import cpu

    devices = detect.processes(cpu.Config() if on_cpu else None)
    # More slots than GPUs go around: 3 slots on GPUs 4 and 6 get 4, 6 and 4.
    return list(itertools.islice(itertools.cycle(devices), parallel or len(devices)))


def single_threaded(parallel: int | None) -> list[Slot]:
    """Returns slots of one CPU thread each; None is as many as this process may use cores.

    The order of sums depends on the number of threads. With one, a job's result has the same bits
    however many jobs run at the same time.
    """
    count = parallel or len(os.sched_getaffinity(0))
    return [{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}] * count


def interrupt_on_signals() -> None:
    """Handles SIGTERM, and SIGHUP unless it is ignored, as under nohup, like Ctrl-C.

    `Execution.run` then stops its processes, which save checkpoints.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def check_parallel(parallel: int | None) -> None:
    """Rejects a number of slots below 1."""
    if parallel is not None and parallel < 1:
        raise ConfigError(f"--parallel must be at least 1, not {parallel}")


@contextmanager
def resumable(total: int, missing: Callable[[], int], what: str) -> Iterator[None]:
    """Writes how many jobs are finished when the user interrupts the block.

    Args:
        total: number of jobs.
        missing: counts the jobs without a result.
        what: their name, as "runs".
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(
            f"{total - missing()} of {total} {what} are finished, and those that had begun are "
            "saved; the same command continues\n"
        )
        raise


def show_progress(
    progress: Progress, finished: int, total: int, left: Range | None, what: str
) -> str:
    """Updates the line on a terminal; elsewhere returns the same as the end of a log line."""
    forecast = "" if left is None or not left.high else ends_in(left.low, left.high)
    progress.update(finished, left=forecast)
    if progress.on_terminal or not forecast:
        return ""
    return f"; {finished} of {total} {what}, {forecast}"


def exit_code(problems: Sequence[str]) -> int:
    """Prints the problems, and returns the command's exit code."""
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return EXIT_FAILED if problems else EXIT_DONE
