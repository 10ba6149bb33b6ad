"""Throughput and model FLOPs utilization (Chowdhery et al. 2022, "PaLM", appendix B)."""

from __future__ import annotations

from collections.abc import Callable

from trainer.monitoring.clock import Reading
from trainer.monitoring.forecast import TimeLeft


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
