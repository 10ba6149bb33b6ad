"""Plots the loss curve of a run from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.errors import DataError, MissingExtra
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
    axes.plot(train[:, 0], train[:, 1], color="#9ecae1", linewidth=1, label="training, each row")
    axes.plot(
        train[:, 0],
        _smooth(train[:, 1]),
        color="#2171b5",
        linewidth=2,
        label="training, moving average",
    )
    if heldout.size:
        axes.plot(
            heldout[:, 0],
            heldout[:, 1],
            "o-",
            color="#d94801",
            markersize=5,
            label="held-out documents",
        )
    axes.set(xlabel="step", ylabel="loss (nats per predicted token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(png)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centered moving average over 4 % of the values; the window shrinks at both ends."""
    window = np.ones(max(1, len(values) // 25))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
