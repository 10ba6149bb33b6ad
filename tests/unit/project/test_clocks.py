"""Clocks of machines differ, and are set: nothing may depend on them but what is shown to users."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from launch import records
from trainer.checkpoint.lock import Owner
from trainer.inspect import housekeeping
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.report.run import RunFolder
from trainer.training.observers.heartbeat import Beat, explain

ROOT = Path(__file__).parents[3]
DAY = 86400.0
# What reads the time of day, and what for. All else measures with clocks that nobody sets.
READERS = {
    "launch/submission/submit.py": "the age of a job, in a table",
    "launch/records.py": "the age of a job, in a table",
    "trainer/checkpoint/holding.py": "notes of readers that are a day old",
    "trainer/checkpoint/lock.py": "the age of a training, in a message",
    "trainer/checkpoint/writer.py": "the age of a checkpoint, in a table",
    "trainer/inspect/certify/run.py": "the date of a certificate",
    "trainer/inspect/housekeeping.py": "the age of a checkpoint, in a table",
    "trainer/monitoring/jsonl.py": "the time of a row, for curves over hours",
    "trainer/monitoring/report/__init__.py": "the age of rows, on a page",
    "trainer/monitoring/report/run.py": "the state of a run, on a page",
    "trainer/monitoring/tensorboard.py": "the time of a row",
    "trainer/monitoring/wandb.py": "the time of a row",
    "trainer/training/observers/heartbeat.py": "how long a rank was silent, in a message",
}


def test_who_reads_the_time_of_day() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("trainer", "data_pipeline", "launch")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if re.search(r"time\.time(_ns)?\(|datetime\.(now|today|utcnow)\(", path.read_text("utf-8"))
    }
    assert found == set(READERS)


@pytest.fixture(params=[-DAY, DAY])
def set_clock(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Sets the clock a day back or forward, when it is called."""
    clock = time.time

    def set_it() -> None:
        monkeypatch.setattr(time, "time", lambda: clock() + request.param)

    return set_it


def test_a_run_on_a_machine_with_another_time_is_running(
    tmp_path: Path, set_clock: Callable[[], None]
) -> None:
    """The page has seen a row come; only before that, the clocks must do."""
    (tmp_path / "config.yaml").write_text("training: {steps: 1000}\n")
    (tmp_path / ".owner").write_text("")
    rows, starts = (JsonlTracker(tmp_path / name) for name in ("metrics.jsonl", "starts.jsonl"))
    starts.log(0, {})
    starts.close()
    run = RunFolder(tmp_path)

    def state() -> str:
        run.read()
        found: str = run.describe("run")["status"]["state"]
        return found

    assert state() == "starting"
    rows.log(1, {"train/loss": 1.0})
    rows.log(2, {"train/loss": 1.0})
    rows.close()
    assert state() == "running"
    set_clock()  # here, or where the run is
    assert state() == "running"
    rows = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=2)
    rows.log(3, {"train/loss": 1.0})
    rows.close()
    assert state() == "running"


def test_a_run_that_has_stopped_is_stalled_whatever_the_clock_says(
    tmp_path: Path, set_clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".owner").write_text("")
    row = {"step": 1, "time": time.time() + DAY, "train/loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "starts.jsonl").write_text(json.dumps({"step": 0, "time": 0}) + "\n")
    run = RunFolder(tmp_path)
    run.read()
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 100)
    run.read()
    assert run.describe("run")["status"]["state"] == "stalled"


def test_ages_are_not_negative(set_clock: Callable[[], None]) -> None:
    owner = replace(Owner.this_process(), since=time.time() + DAY, renewed=time.time() + DAY)
    assert "for 0:00:00 (last sign of life 0:00:00 ago)" in str(owner)
    saved = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds")
    assert housekeeping._age(saved) == "0:00:00"
    assert records._age(-DAY) == "0s"


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_a_silent_rank_is_not_silent_for_days(jump: float) -> None:
    living = Beat(0, "node-a", 1, 1000.0, 12, "forward", "all_reduce", 40.0, "", False)
    silent = replace(living, rank=1, time=958.0 + jump, collective="")
    line = explain({0: living, 1: silent}, [1])
    seconds = int(re.findall(r"no sign of life for (-?\d+) s", line)[0])
    assert 0 <= seconds <= 100
