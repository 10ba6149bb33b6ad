"""Progress of a run: a line on a terminal, elsewhere a log line for each row of metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from samestep.progress import Progress, ends_in
from samestep.terminal import Console
from trainer.monitoring import Tracker

logger = logging.getLogger(__name__)


class ProgressTracker(Tracker):
    """Shows step, loss, learning rate, tokens per second and time left.

    Args:
        step: the step that the run starts from.
        total_steps: number of steps of the whole run.
        console: standard error by default.
    """

    def __init__(
        self,
        step: int,
        total_steps: int,
        console: Console | None = None,
    ) -> None:
        self._total_steps = total_steps
        # Elsewhere each row is logged, and a line at times would say the same again.
        self._progress = Progress(
            "", total_steps, done=step, logs=False, stays=True, console=console
        )
        self._progress.start()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Updates the line; rows without training metrics are printed above it."""
        text = describe(metrics)
        # After the last step only its evaluation and checkpoint are left.
        left = time_left(metrics) if step < self._total_steps else ""
        if not self._progress.on_terminal:
            text = "  ".join(filter(None, (text, left)))
            logger.info("step %d/%d  %s", step, self._total_steps, text)
        elif "train/loss" in metrics:
            self._progress.update(step, text, left)
        else:
            self._progress.console.print(
                f"step {step}/{self._total_steps}  {text}", highlight=False
            )

    def close(self) -> None:
        """Stops updating the line."""
        self._progress.stop()


_SHOWN = {  # in this order
    "train/loss": "loss {:.4f}",
    "train/lr": "lr {:.2e}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "mfu {:.1%}",
}


def describe(metrics: Mapping[str, float]) -> str:
    """Formats a row: its main training metrics, or all metrics if it has none of them."""
    shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
    return "  ".join(shown or (f"{name} {value:.4g}" for name, value in metrics.items()))


def time_left(metrics: Mapping[str, float]) -> str:
    """Formats a row's forecast; empty if it has none, as in the first steps."""
    if "perf/eta_seconds" not in metrics:
        return ""
    return ends_in(metrics["perf/eta_low_seconds"], metrics["perf/eta_high_seconds"])
