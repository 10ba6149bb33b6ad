"""Trackers and the ledger on a file system of which one operation fails, each one in turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from samestep.errors import SamestepError, fix_of
from tests.failing_files import contents, each_failure
from trainer.monitoring import Tracker, WeightsAndBiases, tensorboard, wandb
from trainer.monitoring.jsonl import ALERTS, JsonlTracker, read_rows
from trainer.training.ledger import GENESIS, Ledger, intact_rows


def log_steps(folder: Path, *trackers: Tracker) -> None:
    """Three steps; the metrics of each tracker are those of metrics.jsonl."""
    jsonl = JsonlTracker(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        for tracker in (jsonl, *trackers):
            tracker.log(step, {"train/loss": 1 / step})
    for tracker in (jsonl, *trackers):
        tracker.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_gets_all_steps_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    events = tmp_path / "tensorboard"

    def write() -> None:
        tracker = tensorboard.TensorBoardTracker(tmp_path, {"seed": 1})
        log_steps(tmp_path, tracker)
        assert tracker.complete()

    def check(what: str, _: OSError, raised: Exception | None) -> None:
        assert raised is None, what
        assert "Training continues" in caplog.text, what
        caplog.clear()
        assert tensorboard.holds(tmp_path), what
        tensorboard.TensorBoardTracker(tmp_path, {}).close()  # the next start
        assert len(list(events.iterdir())) == 1, what
        shutil.rmtree(events)
        (tmp_path / "metrics.jsonl").unlink()

    assert each_failure(events, write, check) >= 3


@pytest.mark.long
def test_wandb_gets_all_steps_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Offline. Its own process writes the rows; see `test_wandb` for a disk that it finds full."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, folder = WeightsAndBiases(mode="offline"), tmp_path / "run"

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        log_steps(folder)

    def write() -> None:
        tracker = wandb.WandbTracker(config, folder, {"seed": 1}, list, {})
        tracker.close()
        tracker.complete()

    def check(what: str, _: OSError, raised: Exception | None) -> None:
        assert raised is None, what
        # W&B's own process may keep a run whose end has failed until this process ends.
        assert wandb.holds(config, folder) or f"with samestep sync {folder}" in caplog.text, what
        caplog.clear()
        assert not [name for name in contents(folder) if ".tmp" in name], what
        begin()

    begin()
    assert each_failure(folder, write, check) >= 6


def test_a_ledger_keeps_its_chain(tmp_path: Path) -> None:
    """A start that cuts it back, rows, and its end: rows wait, or an error names the fix."""
    path = tmp_path / "ledger.jsonl"

    def begin() -> str:
        path.unlink(missing_ok=True)
        ledger = Ledger()
        ledger.open(path, 0)
        ledger.enter(0, 0, {"seed": 1}, [])
        head = ledger.head
        ledger.add_step(1, [[0, 10]])
        ledger.close_row("0")
        ledger.close()
        return head

    head = begin()

    def go_on() -> None:
        """From a checkpoint before the last row."""
        ledger = Ledger()
        ledger.head = head
        ledger.open(path, 0)
        for step in (1, 2):
            ledger.add_step(step, [[10 * step - 10, 10 * step]])
            ledger.close_row("0")
        ledger.state_dict()
        ledger.close()

    def check(what: str, error: OSError, raised: Exception | None) -> None:
        rows = [row for row, _ in intact_rows(path)]
        assert rows[0]["head"] == head, what
        assert len(rows) == len(path.read_bytes().splitlines()), what
        if raised is None:
            assert [row["kind"] for row in rows] == ["order", "fed", "fed"], what
        else:
            assert isinstance(raised, SamestepError), what
            assert fix_of(error) in str(raised), what
        assert list(contents(tmp_path)) == [path.name], what
        begin()

    assert head != GENESIS
    assert each_failure(tmp_path, go_on, check) >= 8


def test_an_alert_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    alerts = tmp_path / ALERTS
    tracker.alert("INFO", "first", "")

    def check(what: str, _: OSError, raised: Exception | None) -> None:
        assert raised is None, what
        tracker.alert("INFO", "next", "")
        rows = [json.loads(line) for line in alerts.read_text().splitlines()]
        assert [row["title"] for row in rows][-1] == "next", what

    assert each_failure(alerts, lambda: tracker.alert("WARN", "failed", ""), check) >= 3
    tracker.close()
    assert list(read_rows(tracker.path)) == []
