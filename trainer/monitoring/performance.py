"""How fast a run is, and what it takes: throughput, stragglers, peak memory and energy.

The model FLOPs utilization is from Chowdhery et al. 2022, "PaLM", appendix B.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from trainer.accelerators import Accelerator
from trainer.monitoring.clock import Reading
from trainer.monitoring.forecast import TimeLeft

OWN_WORK = ("data_wait", "forward")
"""Sections of a step without communication. All later ones end when the slowest rank arrives."""

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of getrusage's ru_maxrss


class Throughput:
    """Turns counts and seconds into rates. It reads no clock itself.

    Devices compute every position of a batch, padding included. `perf/mfu` counts the FLOPs of all
    positions: how well the hardware is used. `perf/mfu_useful` counts only the fraction that holds
    tokens: how much of the hardware trains the model. Rows that fill up a rank's share of a batch
    count in neither.

    Args:
        step: the step that the run starts from.
        flops_until: FLOPs of the forward and backward passes of all steps before a given step.
        peak_flops: FLOP/s of all devices together; None if unknown, as on CPUs, for no utilization.
        positions_until: positions that these FLOPs are for, of all steps before a given step.
            Batches may be narrower, and their FLOPs are scaled by their positions, which is
            slightly too much for attention. None: all batches have the full width.
        time_left: forecasts the end of the run; None leaves it out.
    """

    def __init__(
        self,
        step: int,
        *,
        flops_until: Callable[[int], float],
        peak_flops: float | None = None,
        positions_until: Callable[[int], float] | None = None,
        time_left: TimeLeft | None = None,
    ) -> None:
        # A resumed run counts from the step that it resumed from: its clock knows no earlier time.
        self._step = step
        self._flops_until, self._peak_flops = flops_until, peak_flops
        self._positions_until = positions_until
        self._time_left = time_left

    def measure(self, step: int, positions: int, tokens: int, reading: Reading) -> dict[str, float]:
        """Returns the rates since the last call.

        Args:
            step: the current step; greater than at the last call.
            positions: positions of the examples trained on since the last call, on all replicas.
            tokens: positions among them that hold a token.
            reading: time since the last call.

        Returns:
            Without the time of `evaluation`: `perf/tokens_per_second` (positions),
            `perf/useful_tokens_per_second` (tokens), `perf/seconds_per_step`, and if the peak is
            known `perf/mfu` and `perf/mfu_useful`, 0 to 1. Also `data/padding_fraction`;
            `train/flops`, of the whole run so far, at full width;
            `time/SECTION`, fractions that add up to 1; and once enough steps are measured, the
            time left: `perf/eta_seconds`, between `perf/eta_low_seconds` and
            `perf/eta_high_seconds`.
        """
        seconds = reading.seconds
        # A clock may have counted no time at all, as in a test, and everything divides by it.
        total = max(sum(seconds.values()), 1e-9)
        training = max(total - seconds.get("evaluation", 0.0), 1e-9)
        useful = tokens / positions
        rates = {
            "perf/tokens_per_second": positions / training,
            "perf/useful_tokens_per_second": tokens / training,
            "perf/seconds_per_step": training / (step - self._step),
            "data/padding_fraction": 1 - useful,
            "train/flops": self._flops_until(step),
        }
        if self._peak_flops is not None:
            flops = self._flops_until(step) - self._flops_until(self._step)
            if self._positions_until is not None:
                full = self._positions_until(step) - self._positions_until(self._step)
                flops *= positions / full
            rates["perf/mfu"] = flops / training / self._peak_flops
            rates["perf/mfu_useful"] = rates["perf/mfu"] * useful
        left = None if self._time_left is None else self._time_left.measure(step, reading)
        if left is not None:
            rates["perf/eta_seconds"] = left.middle
            rates["perf/eta_low_seconds"], rates["perf/eta_high_seconds"] = left.low, left.high
        self._step = step
        return rates | {f"time/{name}": value / total for name, value in seconds.items()}


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
