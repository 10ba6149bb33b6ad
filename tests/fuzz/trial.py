"""Runs a reader on generated files, in a process with limits, and collects what it may not do.

A reader of a stranger's files returns, or raises an error of samestep. Everything else is a
failure: other exceptions, the end of the process, more than a few seconds or some hundred
megabytes, a file that is written outside of its folder, a connection, another program.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, configuration
from hypothesis.strategies import SearchStrategy

from data_pipeline.sources import BadRecord
from samestep.errors import SamestepError

Files = Mapping[str, bytes]
"""An example: contents by name in its folder."""

CPU_SECONDS = 10
WALL_SECONDS = 120  # of a machine that is busy
MOST_GROWTH = 2**28  # bytes of memory, of files that have some kilobytes
_ADDRESSES = 2**31  # bytes that may be reserved beyond what the process has
_STRATEGY_FAILED, _READER_FAILED = 70, 71  # exit codes
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_reading: list[bool] = []  # not empty while a reader is at work
_PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """A reader of one format.

    Attributes:
        files: returns a strategy that generates examples.
        read: reads the files in a folder.
        expected: errors that it may raise.
    """

    name: str
    files: Callable[[], SearchStrategy[Files]]
    read: Callable[[Path], object]
    expected: tuple[type[BaseException], ...] = (SamestepError, BadRecord)


@dataclass
class Outcome:
    """What has become of the examples of a target."""

    accepted: int = 0
    refused: int = 0
    failures: dict[str, Path] = field(default_factory=dict)
    """A short description of each failure -> a folder with its files."""

    @property
    def tried(self) -> int:
        return self.accepted + self.refused + len(self.failures)


class Breach(BaseException):
    """The reader has touched something outside of its folder."""


def run(target: Target, examples: int, folder: Path, seed: int = 0) -> Outcome:
    """Tries a number of examples; the same ones for the same seed."""
    outcome, folder = Outcome(), folder.absolute()
    strategy = target.files()
    while outcome.tried < examples:
        before = outcome.tried
        _in_child(target, strategy, examples - before, folder, seed + before, outcome)
        if outcome.tried == before:  # the strategy has no more examples
            break
    return outcome


def _in_child(
    target: Target,
    strategy: SearchStrategy[Files],
    examples: int,
    folder: Path,
    seed: int,
    outcome: Outcome,
) -> None:
    """Tries examples until one ends the child process."""
    shared = mmap.mmap(-1, 16)
    current = folder / "current"
    shutil.rmtree(folder, ignore_errors=True) if not outcome.failures else None
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    # A process group that an earlier test left would wait, in the child, for threads it lacks.
    gc.collect()
    gc.freeze()
    child = os.fork()
    if not child:
        code = _STRATEGY_FAILED
        try:
            code = _child(target, strategy, examples, folder, seed, shared)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    gc.unfreeze()
    _, status = os.waitpid(child, 0)
    accepted, refused = struct.unpack("qq", shared[:])
    outcome.accepted += accepted
    outcome.refused += refused
    if status:
        reason = folder / "reason"
        what = reason.read_text() if reason.exists() else _ended(status)
        reason.unlink(missing_ok=True)
        if os.waitstatus_to_exitcode(status) == _STRATEGY_FAILED or not current.exists():
            raise AssertionError((folder / "output").read_text())
        place = folder / f"failure-{seed}-{outcome.tried}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.move(current, place)
        while what in outcome.failures:
            what += " (again)"
        outcome.failures[what] = place


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGPROF, signal.SIGALRM):
            return "it takes too long"
        return f"the process ends by {signal.Signals(number).name}"
    return f"the process ends with {os.WEXITSTATUS(status)}"


def _child(
    target: Target,
    strategy: SearchStrategy[Files],
    examples: int,
    folder: Path,
    seed: int,
    shared: mmap.mmap,
) -> int:
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    current = folder / "current"
    configuration.set_hypothesis_home_dir(folder / "hypothesis")
    _limit_memory()
    _watch(folder)
    counts = [0, 0]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def each(files: Files) -> None:
        write(files, current)
        os.chdir(current)
        accepted = _try(target, current, folder / "reason")
        counts[not accepted] += 1
        shared[:] = struct.pack("qq", *counts)

    each()
    return 0


def _try(target: Target, current: Path, reason: Path) -> bool:
    """Reads one example; ends the process if that fails."""
    with _bounded():
        before = _status("VmRSS")
        _reset_peak()
        try:
            target.read(current)
            accepted, what = True, ""
        except target.expected:
            accepted, what = False, ""
        except BaseException as error:
            accepted, what = False, _describe(error)
        if not what and (grown := _peak() - before) > MOST_GROWTH:
            what = f"it takes {grown >> 20} MiB"
    if what:
        reason.write_text(what)
        os._exit(_READER_FAILED)
    return accepted


def write(files: Files, folder: Path) -> None:
    """Makes a folder with exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _bounded() -> Iterator[None]:
    # Signals without a handler: they end native code as well.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    _reading.append(True)
    try:
        yield
    finally:
        _reading.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def _peak() -> int:
    return _status("VmHWM")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _limit_memory() -> None:
    most = _status("VmSize") + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _watch(folder: Path) -> None:
    """Raises `Breach` in whoever writes elsewhere, connects, or starts a program."""
    inside = (str(folder.absolute()), "/dev/null", "/dev/shm", "/proc/self")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not _reading:
            return
        if event == "open":
            path, _, flags = arguments
            is_written = isinstance(flags, int) and flags & _WRITING
            if is_written and isinstance(path, str | bytes | os.PathLike):
                name = os.path.abspath(os.fsdecode(path))
                # Compiled modules are imported at any time.
                if not name.startswith(inside) and "__pycache__" not in name:
                    raise Breach(f"it writes {name}")
        elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec"):
            raise Breach(f"{event} of {arguments}")
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"):
            name = os.path.abspath(os.fsdecode(arguments[0]))
            if not name.startswith(inside) and "__pycache__" not in name:
                raise Breach(f"{event} of {name}")

    sys.addaudithook(hook)


def _describe(error: BaseException) -> str:
    """The type of an error and the last line of the project that it has passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(_PROJECT))]
    ours = [frame for frame in ours if "/.venv/" not in frame.filename] or list(frames)
    last = ours[-1]
    where = Path(last.filename)
    name = where.relative_to(_PROJECT) if where.is_relative_to(_PROJECT) else where
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__} at {name}:{last.lineno}: {text}"
