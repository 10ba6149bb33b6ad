"""Memory and energy of this process."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.monitoring.performance import Resources


class Metered(CpuAccelerator):
    """A device that has its own memory and tells its energy."""

    joules: float | None = 1000.0

    def energy(self) -> float | None:
        return self.joules

    def peak_memory(self) -> int:
        return 3 * 2**29


@pytest.mark.long
def test_the_peak_of_the_host_memory_follows_what_is_allocated():
    resources = Resources(CpuAccelerator())
    before = resources.memory()["perf/peak_rss_gib"]
    assert 0.01 < before < 100
    held = np.ones(int((before + 0.25) * 2**27))  # 8 bytes each, a quarter of a GiB more than ever
    assert resources.memory()["perf/peak_rss_gib"] > before + 0.2
    del held


def test_a_device_tells_its_memory_and_the_energy_since_the_last_time():
    device = Metered()
    resources = Resources(device)
    assert resources.memory()["perf/peak_memory_gib"] == 1.5
    assert resources.joules() == 0
    device.joules = 1300.4
    assert resources.joules() == 300
    assert resources.joules() == 0


def test_a_device_that_tells_nothing_has_used_nothing():
    device = CpuAccelerator()
    assert Resources(device).joules() == 0
    assert "perf/peak_memory_gib" not in Resources(device).memory()
