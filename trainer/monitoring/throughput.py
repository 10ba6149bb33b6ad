"""Speed: tokens per second, model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B), time left."""

from __future__ import annotations

from collections.abc import Callable


class Throughput:
    """Turns clock readings into rates. It reads no clock itself: every `now` is in seconds, of any monotonic clock.

    Args:
        step: updates already made.
        total_steps: updates of the whole run.
        now: the time at which training begins or continues.
        flops_until: the FLOPs of forward and backward, as the model states them, in all steps before a step.
        peak_flops: of all devices together, per second; None where it is not known, as on CPUs: no utilisation then.
    """

    def __init__(
        self,
        step: int,
        total_steps: int,
        now: float,
        *,
        flops_until: Callable[[int], float],
        peak_flops: float | None = None,
    ) -> None:
        self._first_step, self._started = step, now
        self._step, self._now = step, now
        self._total_steps = total_steps
        self._flops_until, self._peak_flops = flops_until, peak_flops

    def measure(self, step: int, tokens: float, waited: float, now: float) -> dict[str, float]:
        """Returns the rates since the last call and starts a new window.

        Args:
            step: updates made by now; more than at the last call.
            tokens: tokens trained on since the last call, by all replicas.
            waited: seconds since the last call in which training waited for data.
            now: the time.

        Returns:
            `perf/tokens_per_second`, `perf/seconds_per_step`, `perf/mfu` (0 to 1, where the peak is known) and
            `data/wait_fraction` (0 to 1) of the window; `perf/eta_seconds` from the mean speed since the start.
        """
        seconds = max(now - self._now, 1e-9)
        mean_speed = (self._flops_until(step) - self._flops_until(self._first_step)) / max(now - self._started, 1e-9)
        rates = {
            "perf/tokens_per_second": tokens / seconds,
            "perf/seconds_per_step": seconds / (step - self._step),
            "data/wait_fraction": waited / seconds,
            "perf/eta_seconds": (self._flops_until(self._total_steps) - self._flops_until(step)) / mean_speed,
        }
        if self._peak_flops is not None:
            flops = self._flops_until(step) - self._flops_until(self._step)
            rates["perf/mfu"] = flops / seconds / self._peak_flops
        self._step, self._now = step, now
        return rates
