"""Peak memory and energy, as the device and the operating system report them."""

from __future__ import annotations

import sys

from trainer.accelerators import Accelerator

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of getrusage's ru_maxrss


class Resources:
    """Memory and energy of this process and its device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._energy = accelerator.energy()

    def memory(self) -> dict[str, float]:
        """Returns peaks in GiB.

        `perf/peak_rss_gib` is the host's, since the process started; `perf/peak_memory_gib` is the
        device's, since training started, if it has its own memory.
        """
        peaks = {}
        try:
            import resource  # POSIX only
        except ImportError:
            pass
        else:
            # Peaks do not fall again, so one reading at a row misses nothing between rows.
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
            peaks["perf/peak_rss_gib"] = rss / 2**30
        device = self._accelerator.peak_memory()
        if device is not None:
            peaks["perf/peak_memory_gib"] = device / 2**30
        return peaks

    def joules(self) -> int:
        """Returns the device's energy since the last call; 0 if it does not report energy."""
        before, self._energy = self._energy, self._accelerator.energy()
        return 0 if before is None or self._energy is None else round(self._energy - before)
