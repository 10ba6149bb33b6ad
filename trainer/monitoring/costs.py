"""What jobs cost: time, energy and CO2."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_RAPL = Path("/sys/class/powercap")
_READ_SECONDS = 30.0  # the smallest counters hold 65.5 kJ: 2.2 kW for this time


@dataclass(frozen=True)
class Usage:
    """What processes have used.

    Attributes:
        seconds: wall time.
        cpu_seconds: CPU time, user and system.
        device_joules: energy that GPUs have reported.
        cpu_joules: energy that CPUs have reported; None if they report none.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    device_joules: float = 0.0
    cpu_joules: float | None = None


def total(usages: Sequence[Usage]) -> Usage:
    """Adds up usages; the energy of CPUs is known if all of them know it."""
    of_cpus = [usage.cpu_joules for usage in usages if usage.cpu_joules is not None]
    return Usage(
        sum(usage.seconds for usage in usages),
        sum(usage.cpu_seconds for usage in usages),
        sum(usage.device_joules for usage in usages),
        sum(of_cpus) if len(of_cpus) == len(usages) else None,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """How energy and CO2 follow from what was used.

    Attributes:
        watts_per_core: power of a busy CPU core with its share of memory and of the machine, where
            the CPU does not report its energy. About 10: servers of two processors with 64 cores
            take 0.6 to 0.8 kW under load.
        grams_per_kwh: CO2 of the electricity. 473: average of the world in 2024 (Ember, Global
            Electricity Review 2025).
        overhead: energy of the building for each unit of the machine's (PUE). 1.5: average of
            data centers (Uptime Institute, Global Data Center Survey 2024: 1.56).
    """

    watts_per_core: float = 10.0
    grams_per_kwh: float = 473.0
    overhead: float = 1.5

    def kwh(self, used: Usage) -> float:
        """Energy, with the building's overhead."""
        cpu = used.cpu_joules
        if cpu is None:
            cpu = used.cpu_seconds * self.watts_per_core
        return (used.device_joules + cpu) * self.overhead / 3.6e6

    def grams(self, used: Usage) -> float:
        """CO2."""
        return self.kwh(used) * self.grams_per_kwh


class CpuEnergy:
    """Energy of this machine's processors since this object exists.

    Counters start again from 0 after some minutes of full power. As a context, this object reads
    them often enough to notice: `with CpuEnergy() as energy`.

    Args:
        folder: of the counters of Intel and AMD processors (RAPL). They need root, and virtual
            machines have none.
        every: seconds between two readings.
    """

    def __init__(self, folder: Path = _RAPL, every: float = _READ_SECONDS) -> None:
        self._folder, self._every = folder, every
        self._last = self._read()
        self._microjoules = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cpu energy", daemon=True)

    def __enter__(self) -> Self:
        if self._last:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._last:
            self._thread.join()

    def joules(self) -> float | None:
        """Returns the energy; None without counters that can be read."""
        with self._lock:
            now = self._read()
            if not now or now.keys() != self._last.keys():
                return None
            # From one reading to the next, 90 to 10 of 100 is 20.
            self._microjoules += sum(
                (value - self._last[name][0]) % largest for name, (value, largest) in now.items()
            )
            self._last = now
            return self._microjoules / 1e6

    def _follow(self) -> None:
        while not self._ended.wait(self._every):
            self.joules()

    def _read(self) -> dict[str, tuple[int, int]]:
        """The value and the largest value of each processor's counter, in microjoules."""
        try:
            return {
                counter.name: (
                    int((counter / "energy_uj").read_text()),
                    int((counter / "max_energy_range_uj").read_text()) + 1,
                )
                for counter in self._folder.glob("*-rapl:[0-9]")
            }
        except (OSError, ValueError):
            return {}
