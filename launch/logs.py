"""Files that a job leaves in its folder: logs and exit codes."""

from __future__ import annotations

import codecs
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.job import CANCEL, EXIT, State
from samestep.errors import EXIT_DONE, EXIT_PREEMPTED, LaunchError
from samestep.untrusted import read_regular

_POLL_SECONDS = 0.5
_CHUNK = 2**16
_MOST_BYTES = 64  # of a file with an exit code


def read(folder: Path, goes_on: Callable[[], bool], every: float = _POLL_SECONDS) -> Iterator[str]:
    """The text of a job's log files; the tasks of an array follow each other.

    Args:
        folder: of the launch.
        goes_on: whether more may come.
        every: seconds between two calls of `goes_on`; when the job leaves its exit code, it is
            called at once.

    Raises:
        LaunchError: there is no log, and none will come.
    """
    new_decoder = codecs.getincrementaldecoder("utf-8")
    read_bytes: dict[Path, int] = defaultdict(int)
    decoders: dict[Path, codecs.IncrementalDecoder] = {}  # a chunk may end within a character
    asked, has_ended = -math.inf, False
    while True:
        last_look, had_ended, has_ended = False, has_ended, (folder / EXIT).exists()
        if time.monotonic() >= asked + every or (has_ended and not had_ended):
            # Asked before reading, so that the last look reads the end of the log.
            last_look, asked = not goes_on(), time.monotonic()
        for file in sorted(folder.glob("job*.log"), key=lambda path: (len(path.name), path.name)):
            decoder = decoders.setdefault(file, new_decoder("replace"))
            with file.open("rb") as stream:
                stream.seek(read_bytes[file])
                while chunk := stream.read(_CHUNK):
                    read_bytes[file] += len(chunk)
                    yield decoder.decode(chunk)
        if last_look:
            break
        time.sleep(_POLL_SECONDS)
    if not any(read_bytes.values()):
        raise LaunchError(
            f"the job has written no log into {folder} yet. `samestep jobs` says whether it has "
            "started."
        )


def exit_code(folder: Path, tasks: int = 1) -> int | None:
    """The greatest exit code of a job's tasks; None until all of them have left one."""
    files = [folder / EXIT, *folder.glob(f"{EXIT}-*")]
    try:
        codes = [int(read_regular(file, _MOST_BYTES)) for file in files if file.exists()]
    except (OSError, ValueError):
        codes = []
    return max(codes) if len(codes) == tasks else None


def state_of_ended(folder: Path, tasks: int = 1) -> State:
    """The state of a job that neither waits nor runs, from the exit codes of all its tasks."""
    code = exit_code(folder, tasks)
    if code == EXIT_DONE:
        return State("done", False)
    if code == EXIT_PREEMPTED:
        return State("stopped", False)
    if (folder / CANCEL).exists():
        return State("cancelled", False)
    if code is None:
        return State("gone", False, detail="cancelled or killed: its script left no exit code")
    return State("failed", False, detail=f"exit code {code}: see its log")
