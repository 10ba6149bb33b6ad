"""Profiles a few steps with the PyTorch profiler, as configured or on demand."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from trainer.training.observers import Observer
from trainer.training.observers.settings import Profile

logger = logging.getLogger(__name__)

# Larger compressed traces are not analyzed: that takes about fifty times their size in memory.
_MOST_BYTES = 32 * 2**20


class Profiler(Observer):
    """Writes RUN/profiles/step-N-rank-R.json.gz, for ui.perfetto.dev or chrome://tracing."""

    def __init__(self, config: Profile, folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = config.steps, folder, rank
        self._request = folder / "profile"
        self._start = config.start if rank in config.ranks else None
        self._profile: torch.profiler.profile | None = None
        self._first = 0

    def begin_step(self, step: int, first: bool, look: bool) -> None:
        """Starts profiling, if a window begins with this step; looks for RUN/profile if `look`."""
        requested = look and self._rank == 0 and self._request.exists()
        if requested:
            self._request.unlink(missing_ok=True)  # one window for each `touch`
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
            if path.stat().st_size >= _MOST_BYTES:
                return {}
            from trainer.accelerators.traces import communication

            return communication(path)
        except Exception as error:  # a failed profile must not end the run
            logger.warning("cannot write the profile %s: %s", path, error)
            return {}
