"""Speed from counts and seconds."""

from __future__ import annotations

import pytest

from trainer.monitoring.clock import Reading
from trainer.monitoring.performance import Throughput


def reading(**seconds: float) -> Reading:
    return Reading(seconds, [], [])


def test_rates_are_of_the_window():
    # A step is 1,000 tokens of 6e9 FLOPs.
    throughput = Throughput(100, flops_until=lambda step: 6e12 * step, peak_flops=1e14)
    throughput.measure(110, 10_000, 10_000, reading(forward_backward=10.0))
    window = reading(data_wait=0.5, forward_backward=1.5, evaluation=2.0)
    assert throughput.measure(120, 10_000, 7_500, window) == pytest.approx(
        {
            "perf/tokens_per_second": 5_000,
            "perf/useful_tokens_per_second": 3_750,
            "perf/seconds_per_step": 0.2,
            "perf/mfu": 5_000 * 6e9 / 1e14,
            "perf/mfu_useful": 3_750 * 6e9 / 1e14,
            "data/padding_fraction": 0.25,
            "train/flops": 6e12 * 120,
            "time/data_wait": 0.125,
            "time/forward_backward": 0.375,
            "time/evaluation": 0.5,
        }
    )


def test_of_narrower_batches_the_share_of_their_cells_counts():
    throughput = Throughput(
        0,
        flops_until=lambda step: 8e12 * step,
        peak_flops=1e14,
        positions_until=lambda n: 100 * n,
    )
    rates = throughput.measure(2, 50, 40, reading(forward_backward=1.0))
    assert rates["perf/mfu"] == pytest.approx(0.16 * 50 / 200)
    assert rates["perf/tokens_per_second"] == 50


def test_without_a_peak_there_is_no_utilisation():
    rates = Throughput(0, flops_until=float).measure(1, 1, 1, reading(optimizer=1.0))
    assert not {"perf/mfu", "perf/mfu_useful"} & rates.keys()


def test_a_clock_that_stands_still_is_no_crash():
    rates = Throughput(0, flops_until=float).measure(1, 100, 100, reading())
    assert rates["perf/tokens_per_second"] > 0
