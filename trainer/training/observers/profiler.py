"""Profiles a few steps with the PyTorch profiler, as configured or on demand."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from trainer.accelerators.events import is_collective, is_compute, on_device
from trainer.training.observers import Observer
from trainer.training.observers.settings import Profile

logger = logging.getLogger(__name__)

# Larger compressed traces are not analyzed: that takes about fifty times their size in memory.
_MOST_BYTES = 32 * 2**20


class Event(TypedDict, total=False):
    """An event of a Chrome trace with a duration; times in microseconds."""

    name: str
    cat: str
    ts: float
    dur: float


class Profiler(Observer):
    """Writes RUN/profiles/step-N-rank-R.json.gz, for ui.perfetto.dev or chrome://tracing."""

    def __init__(self, config: Profile, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = config.steps, folder, rank
        self._start = config.start if rank in config.ranks else None
        self._profile: torch.profiler.profile | None = None
        self._first = 0

    def begin_step(self, step: int, first: bool, look: bool) -> None:
        """Starts profiling, if a window begins with this step; looks for RUN/profile if `look`."""
        request = self._folder / "profile"
        requested = look and self._rank == 0 and request.exists()
        if requested:
            request.unlink(missing_ok=True)  # one window for each `touch`
        if (step == self._start or requested) and self._profile is None:
            logger.info("profiling    steps %d to %d", step, step + self._steps - 1)
            self._first, self._profile = step, torch.profiler.profile()
            self._profile.start()

    def end_step(self, step: int) -> dict[str, float]:
        """Stops profiling after the last step of a window.

        Returns:
            After a window, `time/communication`, the fraction of its time in which a collective was
            running, and `time/communication_exposed`, the fraction in which nothing was computed
            meanwhile. Otherwise nothing.
        """
        return self._end() if step == self._first + self._steps - 1 else {}

    def close(self) -> None:
        """Ends an open window and writes its trace."""
        self._end()

    def _end(self) -> dict[str, float]:
        # Forgotten first: if writing fails, the next window must not find a broken profiler.
        profile, self._profile = self._profile, None
        if profile is None:
            return {}
        path = self._folder / "profiles" / f"step-{self._first:08d}-rank-{self._rank:05d}.json.gz"
        try:
            profile.stop()
            path.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(path))
            logger.info("profiled     %s; open it at https://ui.perfetto.dev", path)
            return communication(path) if path.stat().st_size < _MOST_BYTES else {}
        except Exception as error:  # a failed profile must not end the run
            logger.warning("cannot write the profile %s: %s", path, error)
            return {}


def communication(trace: Path) -> dict[str, float]:
    """Returns the metrics of `Profiler.end_step` for a trace; empty without a collective."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    # Events without a duration ("ph" other than X), such as counters, take no time.
    collectives = [event for event in events if is_collective(event)]
    if not collectives:
        return {}
    devices = any(map(on_device, events))
    computing = [event for event in events if is_compute(event, devices)]
    # Sweep over the begins and ends of all events. Between two of them, the running sums count the
    # open collectives and computations: begins at 0 and 2 and ends at 3 and 5 give 1, 2, 1, 0.
    # Columns: the time, and the changes of the number of open collectives and computations.
    edges = [(event["ts"], 1, 0) for event in collectives]
    edges += [(event["ts"] + event["dur"], -1, 0) for event in collectives]
    edges += [(event["ts"], 0, 1) for event in computing]
    edges += [(event["ts"] + event["dur"], 0, -1) for event in computing]
    at, *changes = np.array(sorted(edges)).T
    lasts = np.diff(at)
    communicates, computes = np.cumsum(changes, axis=1)[:, :-1] > 0
    total = at[-1] - at[0]
    return {
        "time/communication": float(lasts[communicates].sum() / total),
        "time/communication_exposed": float(lasts[communicates & ~computes].sum() / total),
    }
