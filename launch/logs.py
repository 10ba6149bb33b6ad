"""What jobs leave in their folder: the log, and how they ended."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.job import CANCEL, EXIT, State
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, LaunchError

_POLL_SECONDS = 0.5
_CHUNK = 2**16


def read(folder: Path, goes_on: Callable[[], bool], every: float = _POLL_SECONDS) -> Iterator[str]:
    """The text of a job's log files, those of an array's tasks one after the other.

    Args:
        folder: of the launch.
        goes_on: whether more may come.
        every: seconds after which that is asked again, but at once when the job leaves its exit code.

    Raises:
        LaunchError: there is none, and none will come.
    """
    places: dict[Path, int] = {}
    decoders: dict[Path, codecs.IncrementalDecoder] = {}  # a piece may end within a character
    asked, has_ended = -math.inf, False
    while True:
        last_look, had_ended, has_ended = False, has_ended, (folder / EXIT).exists()
        if time.monotonic() >= asked + every or (has_ended and not had_ended):
            last_look, asked = not goes_on(), time.monotonic()
        for file in sorted(folder.glob("job*.log"), key=lambda path: (len(path.name), path.name)):
            while text := _from(file, places.get(file, 0)):
                places[file] = places.get(file, 0) + len(text)
                decoder = decoders.setdefault(
                    file, codecs.getincrementaldecoder("utf-8")("replace")
                )
                yield decoder.decode(text)
        if last_look:
            break
        time.sleep(_POLL_SECONDS)
    if not places:
        raise LaunchError(
            f"the job has written no log into {folder} yet; `samestep jobs` says whether it has started"
        )


def _from(file: Path, start: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(_CHUNK)


def state_of_ended(folder: Path, tasks: int = 1) -> State:
    """How a job that waits and runs no more has ended, by the code that its script has left, or each of its tasks."""
    try:
        codes = [
            int(file.read_text())
            for file in (folder / EXIT, *folder.glob(f"{EXIT}-*"))
            if file.exists()
        ]
    except (OSError, ValueError):
        codes = []
    code = max(codes) if len(codes) == tasks else None
    if code in (EXIT_DONE, EXIT_PREEMPTED):
        return State("done" if code == EXIT_DONE else "stopped", False)
    if (folder / CANCEL).exists():
        return State("cancelled", False)
    if code is None:
        return State("gone", False, detail="cancelled or killed: its script left no exit code")
    return State("failed", False, detail=f"exit code {code}: see its log")
