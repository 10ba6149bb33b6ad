"""Stragglers: the process that all others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

OWN_WORK = ("data_wait", "forward")
"""The laps of a step in which a process is on its own: those after them end when the slowest one has got so far."""


def own_work(seconds: Mapping[str, float]) -> float:
    """The seconds of a process's laps that only itself is to answer for."""
    return sum(seconds.get(name, 0.0) for name in OWN_WORK)


def slowest(own: Sequence[float], total: float) -> dict[str, float]:
    """Names the straggler.

    Args:
        own: of each rank, the seconds of its own work since the last row.
        total: the seconds since the last row.

    Returns:
        `perf/slowest_rank`, and `perf/slowest_rank_lag`: by what share of the time it is behind the median rank, about
        what the run would gain without it. Nothing where there is one rank only.
    """
    if len(own) < 2:
        return {}
    rank = max(range(len(own)), key=own.__getitem__)
    return {
        "perf/slowest_rank": float(rank),
        "perf/slowest_rank_lag": (own[rank] - statistics.median(own)) / total,
    }
