"""Memory and energy, as the device and the operating system report them."""

from __future__ import annotations

import resource
import sys

from trainer.accelerators import Accelerator

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of getrusage's ru_maxrss


class Resources:
    """What this process and its device use."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._energy = accelerator.energy()

    def memory(self) -> dict[str, float]:
        """The most that was held since training began (of the host: since the process did), in GiB.

        `perf/peak_memory_gib` is of the device's memory, where it has its own, and `perf/peak_rss_gib` of the host's.
        """
        peaks = {
            "perf/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * _RSS_UNIT
            / 2**30
        }
        device = self._accelerator.peak_memory()
        if device is not None:
            peaks["perf/peak_memory_gib"] = device / 2**30
        return peaks

    def joules(self) -> int:
        """Energy that the device has used since the last call; 0 where it does not tell."""
        before, self._energy = self._energy, self._accelerator.energy()
        return 0 if before is None or self._energy is None else round(self._energy - before)
