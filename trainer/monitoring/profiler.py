"""A window of the PyTorch profiler over some steps: asked for in the configuration, or of a run that is under way."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

from trainer.accelerators.events import is_collective, is_compute, on_device
from trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_STEPS = 20  # a trace is a few megabytes a micro-batch
_MOST_BYTES = (
    32 * 2**20
)  # of a compressed trace that is analysed, which takes some fifty times its size in memory


class Event(TypedDict, total=False):
    """An event of a Chrome trace that has a duration; times are in microseconds."""

    name: str
    cat: str
    ts: float
    dur: float


@dataclass(frozen=True)
class Config:
    """Which steps are profiled; `touch RUN/profile` profiles the next ones of a run that is under way.

    Attributes:
        start: the first step to profile, from 1; null profiles on demand only.
        steps: how many steps, 20 at most; memory holds the trace of all their micro-batches, megabytes for each.
        ranks: the processes that profile from `start`; on demand it is rank 0 alone.
    """

    start: int | None = None
    steps: int = 3
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.start is not None and self.start < 1:
            raise ConfigError(
                f"start must be at least 1, or null to profile on demand only, not {self.start}"
            )
        if not 1 <= self.steps <= _MOST_STEPS:
            raise ConfigError(
                f"steps must lie in 1 .. {_MOST_STEPS}, not {self.steps}; traces grow large"
            )

    def build(self, folder: Path, rank: int) -> Profiler:
        """Makes the profiler of this process; `folder` is the run's."""
        return Profiler(self, folder, rank)


class Profiler:
    """Profiles steps and writes RUN/profiles/step-N-rank-R.json.gz, for chrome://tracing or ui.perfetto.dev."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = config.steps, folder, rank
        self._start = config.start if rank in config.ranks else None
        self._profile: torch.profiler.profile | None = None
        self._first = 0

    def begin_step(self, step: int, look: bool) -> None:
        """Opens a window before a step that is to be profiled.

        Args:
            step: the step that is about to be made, from 1.
            look: whether to look for RUN/profile.
        """
        wanted = step == self._start or (look and self._rank == 0 and self._requested())
        if wanted and self._profile is None:
            logger.info("profiling    steps %d to %d", step, step + self._steps - 1)
            self._first, self._profile = step, torch.profiler.profile()
            self._profile.start()

    def end_step(self, step: int) -> dict[str, float]:
        """Closes the window after its last step.

        Returns:
            When a window has ended, `time/communication`, the share of its time in which a collective was under way,
            and `time/communication_exposed`, that in which nothing was computed meanwhile. Otherwise nothing.
        """
        return self.close() if step == self._first + self._steps - 1 else {}

    def _requested(self) -> bool:
        request = self._folder / "profile"
        if not request.exists():
            return False
        request.unlink(missing_ok=True)
        return True

    def close(self) -> dict[str, float]:
        """Closes a window that is open and writes its trace; returns what `end_step` does."""
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
        except Exception as error:  # a profile is no reason to end a run
            logger.warning("the profile %s could not be written: %s", path, error)
            return {}


def communication(trace: Path) -> dict[str, float]:
    """What share of a trace collectives took; see `Profiler.end_step`. Nothing where there was none."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    collectives = [event for event in events if is_collective(event)]
    if not collectives:
        return {}
    devices = any(map(on_device, events))
    computing = [event for event in events if is_compute(event, devices)]
    spans = [_spans(collectives, 1, 0), _spans(computing, 0, 1)]
    at, opened_collectives, opened_computing = np.concatenate(spans, axis=1)
    order = np.argsort(at, kind="stable")
    lasts = np.diff(at[order])
    communicates = opened_collectives[order].cumsum()[:-1] > 0
    computes = opened_computing[order].cumsum()[:-1] > 0
    total = at.max() - at.min()
    return {
        "time/communication": float(lasts[communicates].sum() / total),
        "time/communication_exposed": float(lasts[communicates & ~computes].sum() / total),
    }


def _spans(events: list[Event], collective: int, compute: int) -> np.ndarray:
    """The ends of events as columns (time in microseconds, change in open collectives, change in open computations)."""
    begin = np.array([event["ts"] for event in events], dtype=np.float64)
    end = begin + np.array([event["dur"] for event in events], dtype=np.float64)
    change = np.concatenate((np.ones(len(begin)), -np.ones(len(end))))
    return np.stack((np.concatenate((begin, end)), collective * change, compute * change))
