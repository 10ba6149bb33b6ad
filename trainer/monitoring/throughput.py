"""Speed: tokens per second, model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B), time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Throughput:
    """Turns counts and seconds into rates. It reads no clock itself.

    A cell is a place in an example, a token or padding. Devices compute all cells alike, so that `perf/mfu` counts the
    model's FLOPs for all of them: it says how well the hardware is used. `perf/mfu_useful` counts the share of those
    FLOPs that tokens have of the cells: it says how much of the hardware trains the model. Rows that merely fill up a
    device's part of a batch are in neither.

    Args:
        step: updates already made.
        total_steps: updates of the whole run.
        flops_until: the FLOPs of forward and backward, as the model states them, in all steps before a step.
        peak_flops: of all devices together, per second; None where it is not known, as on CPUs: no utilisation then.
        cells_until: the cells that these FLOPs are for, in all steps before a step; where batches may be narrower,
            their FLOPs are taken to be less as their cells are, a little too much for attention. None: they are not.
    """

    def __init__(
        self,
        step: int,
        total_steps: int,
        *,
        flops_until: Callable[[int], float],
        peak_flops: float | None = None,
        cells_until: Callable[[int], float] | None = None,
    ) -> None:
        self._first_step = self._step = step
        self._total_steps = total_steps
        self._flops_until, self._peak_flops, self._cells_until = (
            flops_until,
            peak_flops,
            cells_until,
        )
        self._trained = 0.0

    def measure(
        self, step: int, cells: int, tokens: int, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the rates since the last call and starts a new window.

        Args:
            step: updates made by now; more than at the last call.
            cells: cells of the examples trained on since the last call, by all replicas.
            tokens: how many of them hold a token.
            seconds: where the time since the last call went, by name.

        Returns:
            Of the window, without the time of `evaluation`: `perf/tokens_per_second` (cells),
            `perf/useful_tokens_per_second` (tokens), `perf/seconds_per_step`, and where the peak is known `perf/mfu`
            and `perf/mfu_useful`, 0 to 1; `data/padding_fraction`, the share of cells without a token; `time/NAME`, the
            share of all the window's time, which add up to 1; `perf/eta_seconds` from the mean speed since the start.
        """
        total = max(sum(seconds.values()), 1e-9)
        training = max(total - seconds.get("evaluation", 0.0), 1e-9)
        self._trained += training
        mean_speed = (self._flops_until(step) - self._flops_until(self._first_step)) / self._trained
        useful = tokens / cells
        rates = {
            "perf/tokens_per_second": cells / training,
            "perf/useful_tokens_per_second": tokens / training,
            "perf/seconds_per_step": training / (step - self._step),
            "perf/eta_seconds": (self._flops_until(self._total_steps) - self._flops_until(step))
            / mean_speed,
            "data/padding_fraction": 1 - useful,
        }
        if self._peak_flops is not None:
            flops = self._flops_until(step) - self._flops_until(self._step)
            if self._cells_until is not None:
                flops *= cells / (self._cells_until(step) - self._cells_until(self._step))
            rates["perf/mfu"] = flops / training / self._peak_flops
            rates["perf/mfu_useful"] = rates["perf/mfu"] * useful
        self._step = step
        return rates | {f"time/{name}": value / total for name, value in seconds.items()}
