"""Progress of a run: a bar on a terminal, elsewhere a log line for each row of metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

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
        console = console or Console(stderr=True)
        self._total_steps = total_steps
        # A bar in a log file would be a line for each update, so elsewhere each row is logged.
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total_steps, completed=step)
            self._bar.start()
            console.show_cursor()  # a killed process could not restore it

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Updates the bar; rows without training metrics are printed above it."""
        text = describe(metrics)
        if self._bar is None:
            logger.info("step %d/%d  %s", step, self._total_steps, text)
        elif "train/loss" in metrics:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self._bar.console.print(f"step {step}/{self._total_steps}  {text}", highlight=False)

    def close(self) -> None:
        """Stops updating the bar."""
        if self._bar is not None:
            self._bar.stop()


_SHOWN = {  # in this order
    "train/loss": "loss {:.4f}",
    "train/lr": "lr {:.2e}",
    "perf/tokens_per_second": "{:,.0f} tokens/s",
    "perf/mfu": "mfu {:.1%}",
}


def describe(metrics: Mapping[str, float]) -> str:
    """Formats a row: its main training metrics, or all metrics if it has none of them."""
    shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
    if "perf/eta_seconds" in metrics:
        shown.append(f"eta {timedelta(seconds=round(metrics['perf/eta_seconds']))}")
    return "  ".join(shown or (f"{name} {value:.4g}" for name, value in metrics.items()))
