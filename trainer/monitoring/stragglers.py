"""Stragglers: the rank that all others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

OWN_WORK = ("data_wait", "forward")
"""Sections of a step without communication. All later ones end when the slowest rank arrives."""


def own_work(seconds: Mapping[str, float]) -> float:
    """Returns the seconds that a rank spent without waiting for others."""
    return sum(seconds.get(name, 0.0) for name in OWN_WORK)


def slowest(
    own: Sequence[float],
    total: float,
) -> dict[str, float]:
    """Finds the straggler.

    Args:
        own: seconds of each rank's own work since the last row.
        total: seconds since the last row.

    Returns:
        `perf/slowest_rank`, and `perf/slowest_rank_lag`: how far it is behind the median rank, as a
        fraction of the time, which is about what the run would gain without it. Empty for one rank.
    """
    if len(own) < 2:
        return {}
    # Example: 1.0, 1.1 and 1.6 s of own work in 2 s name rank 2, with a lag of (1.6 - 1.1) / 2. A
    # rank's waiting does not count, or all but the slowest would look alike.
    rank = max(range(len(own)), key=own.__getitem__)
    return {
        "perf/slowest_rank": float(rank),
        "perf/slowest_rank_lag": (own[rank] - statistics.median(own)) / total,
    }
