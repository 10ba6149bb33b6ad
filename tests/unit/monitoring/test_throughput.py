"""Speed from clock readings."""

from __future__ import annotations

import pytest

from trainer.monitoring.throughput import Throughput


def test_rates_are_of_the_window_and_the_time_left_is_from_the_mean():
    # A step up to 200 is 1,000 tokens of 6e9 FLOPs; later ones, of another phase, are twice the work.
    throughput = Throughput(
        100, 300, now=50.0, flops_until=lambda step: 6e12 * (step + max(0, step - 200)), peak_flops=1e14
    )
    throughput.measure(110, tokens=10_000, waited=0.0, now=60.0)
    assert throughput.measure(120, tokens=10_000, waited=0.5, now=62.0) == pytest.approx(
        {
            "perf/tokens_per_second": 5_000,
            "perf/seconds_per_step": 0.2,
            "perf/mfu": 5_000 * 6e9 / 1e14,
            "data/wait_fraction": 0.25,
            "perf/eta_seconds": 12 / 20 * (80 + 2 * 100),
        }
    )


def test_without_a_peak_there_is_no_utilisation():
    assert "perf/mfu" not in Throughput(0, 10, now=0.0, flops_until=float).measure(1, 1, 0.0, now=1.0)


def test_a_clock_that_stands_still_is_no_crash():
    rates = Throughput(0, 10, now=5.0, flops_until=float).measure(1, 100, 0.0, now=5.0)
    assert rates["perf/tokens_per_second"] > 0
