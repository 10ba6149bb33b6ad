"""Plots the loss curve of a run from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from samestep.errors import DataError, MissingExtra
from trainer.monitoring.jsonl import read_rows


def plot_loss(metrics: Path, png: Path) -> None:
    """Plots the training loss, raw and smoothed, and the held-out loss over steps.

    Raises:
        DataError: the file has no row with `train/loss`.
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "plotting a loss curve") from error
    rows = list(read_rows(metrics))
    # Rows of evaluations have no training loss, and most rows no held-out loss.
    train, heldout = (
        np.array([(row["step"], row[name]) for row in rows if name in row])
        for name in ("train/loss", "heldout/loss")
    )
    if not train.size:
        raise DataError(
            f"{metrics} has no train/loss yet; train for at least training.log_every steps"
        )

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps, loss = train.T
    axes.plot(steps, loss, color="#9ecae1", linewidth=1, label="training, each row")
    # Over 4 % of the rows: most of the noise of batches goes, and the shape stays.
    smooth = moving_average(loss, max(1, len(loss) // 25))
    axes.plot(steps, smooth, color="#2171b5", linewidth=2, label="training, moving average")
    if heldout.size:
        axes.plot(*heldout.T, "o-", color="#d94801", markersize=5, label="held-out documents")
    axes.set(xlabel="step", ylabel="loss (nats per predicted token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(png)


def moving_average(
    values: npt.NDArray[np.float64],
    width: int,
) -> npt.NDArray[np.float64]:
    """Centered mean of `width` values; the window shrinks at both ends."""
    # Of 1 2 3 4 with width 3: the sums 3 6 9 7, of 2 3 3 2 values. Differences of running sums
    # cost the same for any width.
    total = np.concatenate([[0.0], np.cumsum(values)])
    first = np.arange(len(values)) - width // 2
    begin, end = np.maximum(first, 0), np.minimum(first + width, len(values))
    mean: npt.NDArray[np.float64] = (total[end] - total[begin]) / (end - begin)
    return mean
