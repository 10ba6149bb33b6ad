"""The terminal's view of a run."""

from __future__ import annotations

import io
import logging

import pytest

from samestep.terminal import Console
from trainer.monitoring.progress import ProgressTracker

ROW = {
    "train/loss": 6.54321,
    "train/accuracy": 0.1,
    "train/lr": 1e-4,
    "perf/tokens_per_second": 12345.6,
    "perf/eta_seconds": 3723.4,
    "perf/eta_low_seconds": 3423.4,
    "perf/eta_high_seconds": 4023.4,
}
SHOWN = "loss 6.5432  lr 1.00e-04  12,346 tokens/s"
ENDS = "ends in 57:03 to 1:07:03"


def test_without_a_terminal_each_row_is_one_log_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    tracker = ProgressTracker(0, 500, Console(file=io.StringIO()))
    tracker.log(10, ROW)
    tracker.log(20, {"heldout/loss": 5.25, "heldout/accuracy": 0.125})
    tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"step 10/500  {SHOWN}  {ENDS}",
        "step 20/500  heldout/loss 5.25  heldout/accuracy 0.125",
    ]


def test_on_a_terminal_there_is_a_bar_that_starts_at_the_resumed_step(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    screen = io.StringIO()
    tracker = ProgressTracker(100, 500, Console(file=screen, force_terminal=True, width=120))
    tracker.log(110, ROW)
    tracker.log(110, {"heldout/loss": 5.25})
    tracker.close()
    text = screen.getvalue()
    assert "100/500" in text
    assert "110/500" in text
    assert f"{ENDS} {SHOWN}" in text
    assert "step 110/500  heldout/loss 5.25" in text
    assert not caplog.records
