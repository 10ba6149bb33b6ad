"""The loss curve as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from samestep.errors import DataError, MissingExtra
from trainer.monitoring.curves import plot_loss
from trainer.monitoring.jsonl import JsonlTracker


def write_run(path: Path, rows: int, heldout: bool) -> None:
    tracker = JsonlTracker(path)
    for step in range(10, 10 * rows + 10, 10):
        tracker.log(step, {"train/loss": 3 + 7 * float(np.exp(-step / 300))})
        if heldout and step % 100 == 0:
            tracker.log(step, {"heldout/loss": 3.2})
    tracker.close()


@pytest.mark.parametrize(("rows", "heldout"), [(1, False), (3, False), (100, True)])
def test_a_run_of_any_length_gives_a_png(tmp_path: Path, rows: int, heldout: bool):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "metrics.jsonl", rows, heldout)
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rows_is_explained(tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(DataError, match="no train/loss"):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_without_matplotlib_the_extra_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install .matplotlib>="):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
