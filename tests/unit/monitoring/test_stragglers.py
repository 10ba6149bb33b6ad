"""The rank that the others wait for."""

from __future__ import annotations

import pytest

from trainer.monitoring.performance import own_work, slowest


def test_the_slowest_rank_and_what_it_costs():
    assert slowest([1.0, 1.2, 3.0, 1.0], total=10.0) == {
        "perf/slowest_rank": 2.0,
        "perf/slowest_rank_lag": pytest.approx(0.19),
    }
    assert slowest([1.0], total=10.0) == {}


def test_waiting_for_others_is_not_own_work():
    laps = {"data_wait": 1.0, "waiting": 8.0, "forward": 2.0, "backward": 4.0, "optimizer": 0.5}
    assert own_work(laps) == 3.0
