"""W&B holds each step of metrics.jsonl exactly once, whatever was killed.

Checked on the real client, offline.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from samestep.config import decode
from samestep.errors import ConfigError, MissingExtra
from tests.server import QuietServer
from tests.unit.monitoring.offline_wandb import (
    ended,
    offline_alerts,
    offline_records,
    offline_rows,
    offline_summary,
    wait_for,
)
from trainer.monitoring import WeightsAndBiases
from trainer.monitoring import wandb as tracking
from trainer.monitoring.artifacts import CheckpointArtifacts
from trainer.monitoring.jsonl import JsonlTracker, read_rows

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see no W&B account of the person who runs them, and start no statistics collector."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")
    monkeypatch.setenv("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", "1")


CHILD = """
import sys, time
from pathlib import Path
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring import WeightsAndBiases
from trainer.monitoring.wandb import WandbTracker

folder, mode, first, last, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
trackers = [JsonlTracker(folder / "metrics.jsonl", resume_step=first - 1)]
trackers.append(WandbTracker(WeightsAndBiases(project="p", entity="e", mode=mode), folder, {"seed": 1}, list, {"restarts": 1}))
for step in range(first, last + 1):
    for tracker in trackers:
        tracker.log(step, {"train/loss": 1 / step})
        if step % 5 == 0:
            tracker.log(step, {"heldout/loss": 2 / step})
print("logged", trackers[1]._run.starting_step, flush=True)
if end == "wait":
    time.sleep(100)
for tracker in trackers:
    tracker.close()
"""  # noqa: E501


def run_steps(
    folder: Path, mode: str, first: int, last: int, kill_when: Callable[[], object] | None = None
) -> int:
    """Trains from step `first` to `last` in a process, and kills it when all is logged and
    `kill_when` holds.

    Returns:
        The step that W&B expected first; 0 unless it has resumed the run.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [str(folder), mode, str(first), str(last), "wait" if kill_when else "close"]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], env=environment, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        logged, starting_step = child.stdout.readline().split()
        assert logged == b"logged"
    if kill_when:
        wait_for(kill_when)
        child.kill()  # W&B's own process ends with its parent, and what it has not written is lost
    assert child.wait(60) == (-signal.SIGKILL if kill_when else 0)
    return int(starting_step)


def check_history(rows: list[dict[str, Any]], folder: Path, last: int) -> None:
    """Each step is there once, in order, with its metrics and the time at which they were first
    logged.
    """
    times = {row["step"]: row["time"] for row in read_rows(folder / "metrics.jsonl")}
    assert [row["_step"] for row in rows] == list(range(1, last + 1))
    assert [row["loss/train_loss"] for row in rows] == [1 / step for step in range(1, last + 1)]
    assert [row.get("loss/heldout_loss") for row in rows] == [
        None if s % 5 else 2 / s for s in range(1, last + 1)
    ]
    assert times[1] - 0.001 <= rows[0]["_timestamp"] <= times[2] + 0.001


@pytest.mark.long
def test_offline_no_step_is_doubled_or_missing_after_kills_and_resumes(tmp_path: Path):
    run_steps(tmp_path, "offline", 1, 10, kill_when=lambda: offline_rows(tmp_path))
    run_steps(
        tmp_path, "offline", 7, 12, kill_when=lambda: True
    )  # the newest checkpoint was of step 6
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    run_steps(tmp_path, "offline", 9, 14)
    assert ended(tmp_path) == [0]
    rows = offline_rows(tmp_path)
    check_history(rows, tmp_path, 14)
    assert rows[0]["_timestamp"] == pytest.approx(
        next(read_rows(tmp_path / "metrics.jsonl"))["time"], abs=0.01
    )
    assert [path.name.rsplit("-", 1)[1] for path in tmp_path.glob("wandb/offline-run-*")] == [
        run_id
    ]


class FakeServer(QuietServer):
    """As much of the W&B server as a run needs: it keeps the history of one run by line number."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.lines: dict[int, str] = {}
        self.alerts: list[dict[str, Any]] = []
        self.silent_at_alerts = False
        self.silent, self.over = threading.Event(), threading.Event()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(self.lines[number]) for number in sorted(self.lines)]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        run = {
            "id": "r",
            "name": variables.get("name"),
            "displayName": "r",
            "project": project,
            "config": "{}",
        }
        if "RunResumeStatus" in query:
            last = self.lines[max(self.lines)] if self.lines else "{}"
            counts = {"historyLineCount": len(self.lines), "logLineCount": 0, "eventsLineCount": 0}
            tails = {
                "historyTail": json.dumps([last]),
                "eventsTail": "[]",
                "summaryMetrics": last,
                "wandbConfig": json.dumps({"t": 1}),  # empty for a run that was never started
            }
            return {
                "model": {**project, "bucket": {**run, **counts, **tails}} if self.lines else None
            }
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": run, "inserted": not self.lines}}
        if "notifyScriptableRunAlert" in query:
            self.alerts.append(variables)
            if self.silent_at_alerts:
                self.silent.set()
            return {"notifyScriptableRunAlert": {"success": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        reply: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            request = json.loads(body)
            reply = {"data": self.server.answer(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            for name, chunk in json.loads(body).get("files", {}).items():
                if name == "wandb-history.jsonl":
                    self.server.lines.update(enumerate(chunk["content"], start=chunk["offset"]))
        if self.server.silent.is_set():
            self.server.over.wait()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "1")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.mark.long
def test_online_no_step_is_doubled_or_missing_after_kills_and_resumes(
    tmp_path: Path, server: FakeServer
):
    run_steps(tmp_path, "online", 1, 10, kill_when=lambda: len(server.lines) > 7)
    assert run_steps(tmp_path, "online", 7, 14) > 7  # it resumes, ahead of the checkpoint
    check_history(server.rows, tmp_path, 14)


class FakeRun:
    """A resumed online run: the server already holds the steps below `starting_step`."""

    url = "https://wandb.ai/e/p/runs/1"

    def __init__(self, starting_step: int) -> None:
        self.starting_step = starting_step
        self.rows: dict[int, dict[str, float]] = {}
        self.steps: list[int] = []
        self.summary: dict[str, Any] = {}

    def log(self, metrics: dict[str, float], step: int, commit: bool) -> None:
        self.steps.append(step)
        self.rows[step] = metrics

    def alert(self, **_: Any) -> None:
        """Sends nothing."""

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run."""


@pytest.mark.parametrize(
    ("held", "checkpoint", "sent"),
    [
        (
            10,
            6,
            [11, 12],
        ),  # the server is ahead of the checkpoint: repeated steps are not sent again
        (4, 6, [5, 6, 7, 8, 9, 10, 11, 12]),  # it lost rows: they are sent from metrics.jsonl
        (0, 6, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),  # it has never heard of the run
    ],
)
def test_online_the_server_gets_what_it_lacks_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, checkpoint: int, sent: list[int]
):
    run, requested = FakeRun(held + 1 if held else 0), {}
    monkeypatch.setattr(wandb, "init", lambda **settings: requested.update(settings) or run)
    jsonl = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 11):
        jsonl.log(step, {"train/loss": 1 / step})
    jsonl.close()
    JsonlTracker(tmp_path / "metrics.jsonl", resume_step=checkpoint).close()
    tracker = tracking.WandbTracker(
        WeightsAndBiases(mode="online", entity="e", group="g", tags=("a",)),
        tmp_path,
        {"seed": 1},
        list,
        {"restarts": 1},
    )
    for step in range(checkpoint + 1, 13):
        tracker.log(step, {"train/loss": 1 / step})
    tracker.close()
    assert run.steps == sent
    wanted = {
        "mode": "online",
        "resume": "allow",
        "entity": "e",
        "group": "g",
        "tags": ("a",),
        "name": tmp_path.name,
    }
    assert requested.items() >= wanted.items()
    assert requested["config"] == {"seed": 1}


def test_a_failure_between_the_rows_of_a_step_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """W&B cannot add to a step that it has, so it gets all rows of a step together."""
    metrics, sent = tmp_path / "metrics.jsonl", {}

    def start(first: int) -> list[Any]:
        run = FakeRun(max(sent, default=-1) + 1)
        run.rows = sent
        monkeypatch.setattr(wandb, "init", lambda **_: run)
        jsonl = JsonlTracker(metrics, resume_step=first - 1)
        return [
            jsonl,
            tracking.WandbTracker(WeightsAndBiases(mode="online"), tmp_path, {}, list, {}),
        ]

    def log(trackers: list[Any], step: int, name: str) -> None:
        for tracker in trackers:
            tracker.log(step, {name: 1 / step})

    trackers = start(1)
    for step in range(1, 6):
        log(trackers, step, "train/loss")
    trackers[1].alert("ERROR", "The run has failed", "out of memory in the evaluation")
    assert sorted(sent) == [1, 2, 3, 4]
    trackers[0].close()
    began = time.time()
    trackers = start(4)
    for step in range(4, 6):
        log(trackers, step, "train/loss")
    log(trackers, 5, "heldout/loss")
    for tracker in trackers:
        tracker.close()
    assert sorted(sent) == [1, 2, 3, 4, 5]
    assert sent[5].pop("_timestamp") >= began
    assert sent[5] == {"loss/train_loss": 0.2, "loss/heldout_loss": 0.2}


def log_steps(folder: Path, tracker: Any, last: int) -> None:
    jsonl = JsonlTracker(folder / "metrics.jsonl")
    for step in range(1, last + 1):
        for each in (jsonl, tracker):
            each.log(step, {"train/loss": 1 / step})
    for each in (jsonl, tracker):
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("left", [0, 300])
def test_offline_what_a_full_disk_has_taken_is_written_at_the_end(
    tmp_path: Path,
    left: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """W&B's own process writes nothing after the first error, and does not say so."""
    config = WeightsAndBiases(mode="offline")
    tracker = tracking.WandbTracker(config, tmp_path, {}, list, {})
    log_steps(tmp_path, tracker, 20)
    assert ended(tmp_path) == [0]
    assert tracking.holds(config, tmp_path)
    (lost,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    os.truncate(lost, left)
    assert not tracking.holds(config, tmp_path)
    monkeypatch.setattr(tracking, "_WRITTEN_SECONDS", 1.0)
    assert tracker.complete()
    assert not lost.exists()
    assert [row["_step"] for row in offline_rows(tmp_path)] == list(range(1, 21))
    assert "W&B lacks steps" not in caplog.text


def test_a_file_of_another_version_of_wandb_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(b":W&C and something")
    (tmp_path / "wandb_run.json").write_text('{"id": "abc"}')
    JsonlTracker(tmp_path / "metrics.jsonl").log(1, {})
    assert tracking.holds(WeightsAndBiases(mode="offline"), tmp_path)
    assert "is unknown" in caplog.text


def test_online_a_run_without_a_network_at_its_start_sends_all_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config, run = WeightsAndBiases(mode="online"), FakeRun(0)
    monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    tracker = tracking.WandbTracker(config, tmp_path, {}, list, {})
    log_steps(tmp_path, tracker, 5)
    assert not tracker.complete()
    assert f"send them with samestep sync {tmp_path}" in caplog.text
    assert not tracking.holds(config, tmp_path)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracking.WandbTracker(config, tmp_path, {}, list, {}, most=4).close()
    assert run.steps == [1, 2, 3, 4]
    assert tracking.holds(config, tmp_path, most=4)
    assert not tracking.holds(config, tmp_path)
    run.starting_step = 5
    for _ in range(2):
        assert tracker.complete()
    assert run.steps == [1, 2, 3, 4, 5]
    assert tracking.holds(config, tmp_path)
    assert tracking.holds(WeightsAndBiases(mode="offline"), tmp_path), "the server has them"


def test_online_uploads_that_take_too_long_are_not_waited_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config, run, started = WeightsAndBiases(mode="online"), FakeRun(0), []

    def finish(exit_code: int = 0) -> None:
        raise TimeoutError

    monkeypatch.setattr(run, "finish", finish)
    monkeypatch.setattr(wandb, "init", lambda **settings: started.append(settings) or run)
    tracker = tracking.WandbTracker(config, tmp_path, {}, list, {})
    assert started[0]["settings"].finish_timeout_raises
    log_steps(tmp_path, tracker, 5)
    assert not tracker.complete()
    assert len(started) == 1
    assert f"send them with samestep sync {tmp_path}" in caplog.text
    assert not tracking.holds(config, tmp_path)


def test_offline_the_old_history_stays_until_the_new_folder_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jsonl = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        jsonl.log(step, {"train/loss": 1 / step})
    jsonl.log(2, {"heldout/loss": 0.25})
    jsonl.close()
    (tmp_path / "wandb_run.json").write_text('{"id": "abc"}')
    old = tmp_path / "wandb" / "offline-run-1-abc"
    old.mkdir(parents=True)
    run, sent_before = FakeRun(0), []
    remove = tracking.shutil.rmtree

    def remove_old(folder: Path, ignore_errors: bool) -> None:
        sent_before.extend(run.steps)
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(tracking.shutil, "rmtree", remove_old)
    monkeypatch.setattr(run, "settings", wandb.Settings(), raising=False)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="offline"), tmp_path, {}, list, {})
    assert not old.exists()
    assert sent_before == [1, 2]
    tracker.log(3, {"train/loss": 1 / 3})
    tracker.close()
    assert run.steps == [1, 2, 3]
    assert run.rows[2].items() >= {"loss/train_loss": 0.5, "loss/heldout_loss": 0.25}.items()


def test_a_failure_of_wandb_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    run = FakeRun(0)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setattr(run, "log", lambda *_, **__: 1 / 0)
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="online"), tmp_path, {}, list, {})
    for step in range(3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    assert ["division by zero" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.long
def test_a_server_that_does_not_answer_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="online"), tmp_path, {}, list, {})
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert "Training continues" in caplog.text


FAILING_CHILD = """
import os, sys
from pathlib import Path
from trainer.monitoring import wandb as tracking
from trainer.monitoring import WeightsAndBiases

folder, mode, last_step = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
tracker = tracking.WandbTracker(WeightsAndBiases(mode=mode), folder, {"seed": 1}, list, {"restarts": 3})
tracker.log(1, {"train/loss": 1.0})
tracker.log(2, {"train/loss": 1.0})
tracker.alert("WARN", "A step was skipped", "https://me:pass@host/data.tar?X-Amz-Signature=abc is odd")
tracker.alert("ERROR", "The run has failed", "why")
tracker.log(3, {"train/loss": 1.0})
exec(last_step)
"""  # noqa: E501
ALERTS = [
    ("WARN", "A step was skipped", "https://host/data.tar is odd"),
    ("ERROR", "The run has failed", "why"),
]


def fail(folder: Path, mode: str, last_step: str, before: str = "") -> None:
    """Runs, in a process, a tracker to which an error happens."""
    code = FAILING_CHILD.replace("tracker = ", f"{before}\ntracker = ", 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [sys.executable, "-c", code, str(folder), mode, last_step]
    assert subprocess.run(arguments, env=environment, timeout=100).returncode == 1


@pytest.mark.long
def test_an_alert_says_no_secrets_and_an_error_is_written_though_the_process_ends_at_once(
    tmp_path: Path,
):
    """As it does under a launcher."""
    fail(tmp_path, "offline", "os._exit(1)")
    assert ended(tmp_path) == [1]
    assert offline_alerts(tmp_path) == ALERTS
    assert [row["_step"] for row in offline_rows(tmp_path)] == [1]
    assert offline_summary(tmp_path)["restarts"] == 3


@pytest.mark.long
def test_alerts_reach_the_server(tmp_path: Path, server: FakeServer):
    fail(tmp_path, "online", "os._exit(1)")
    assert [(alert["severity"], alert["title"], alert["text"]) for alert in server.alerts] == ALERTS


@pytest.mark.long
def test_a_server_that_falls_silent_at_an_alert_does_not_keep_the_process(
    tmp_path: Path, server: FakeServer
):
    """Left to itself, W&B would try again for many minutes, and the end of Python waits for W&B."""
    server.silent_at_alerts = True
    shorter = "tracking.FINISH_SECONDS, tracking._REQUEST_SECONDS, tracking._REQUEST_RETRIES = 3.0, 1.0, 1"  # noqa: E501
    fail(tmp_path, "online", "sys.exit(1)", before=shorter)
    assert server.silent.is_set()


@pytest.mark.parametrize("hangs", ["alert", "finish"])
def test_an_alert_holds_up_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: str
):
    """Though W&B hangs; and one that fails stops nothing."""
    monkeypatch.setattr(tracking, "ALERT_SECONDS", 0.1)
    release, run = threading.Event(), FakeRun(0)
    monkeypatch.setattr(run, hangs, lambda **_: release.wait(60))
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker, began = (
        tracking.WandbTracker(WeightsAndBiases(mode="online"), tmp_path, {}, list, {}),
        time.monotonic(),
    )
    tracker.alert("ERROR", "The run hangs", "in forward")
    assert time.monotonic() - began < 10
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "wandb-alert")
    release.set()

    run = FakeRun(0)
    monkeypatch.setattr(run, "alert", lambda **_: 1 / 0)
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="online"), tmp_path, {}, list, {})
    tracker.alert("WARN", "A step was skipped", "")
    tracker.log(1, {})
    assert "division by zero" in caplog.text


def test_alerts_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = FakeRun(0)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    tracker = tracking.WandbTracker(
        WeightsAndBiases(mode="online", alerts=False), tmp_path, {}, list, {}
    )
    tracker.alert("ERROR", "The run has failed", "")
    tracker.log(1, {})
    tracker.close()
    assert run.steps == [1]


def test_a_trial_of_a_sweep_takes_the_id_of_its_agent_and_no_folder_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own"
    monkeypatch.setenv("WANDB_RUN_ID", "trial1")
    tracking.claim(own)
    assert not own.exists()  # without a sweep, the variable is not about this run
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    own.mkdir()
    for _ in range(2):
        tracking.claim(own)
    assert json.loads((own / "wandb_run.json").read_text()) == {"id": "trial1"}
    monkeypatch.setenv("WANDB_RUN_ID", "trial2")
    with pytest.raises(ConfigError, match="holds the W&B run trial1, and trial trial2"):
        tracking.claim(own)
    (other := tmp_path / "other").mkdir()
    (other / "starts.jsonl").touch()
    with pytest.raises(ConfigError, match="holds a run without W&B"):
        tracking.claim(other)
    assert [file.name for file in other.iterdir()] == ["starts.jsonl"]


@pytest.mark.long
def test_committed_checkpoints_become_artifacts_whose_files_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    committed: list[str] = []
    config = WeightsAndBiases(mode="offline", log_checkpoints=True)
    tracker = tracking.WandbTracker(config, tmp_path, {}, lambda: committed, {})
    for step in (1, 2, 3):
        lease = "-lease-7" if step == 2 else ""  # its plain name was taken
        folder = tmp_path / "checkpoints" / f"step-{step:08d}{lease}"
        folder.mkdir(parents=True)
        (folder / "rank-00000.safetensors").write_bytes(bytes([step]) * 1000)
        (folder / "meta.json").write_text("{}")
        committed.append(str(folder))
        tracker.log(step, {"train/loss": 1.0})
    committed.append(str(tmp_path / "checkpoints" / "step-00000004"))  # retention was quicker
    committed.append("s3://bucket/run/step-00000005")
    tracker.close()
    assert ended(tmp_path) == [0]
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    artifacts = list(offline_records(tmp_path, "artifact"))
    assert {artifact.name for artifact in artifacts} == {f"checkpoint-{run_id}"}
    assert [set(artifact.aliases) for artifact in artifacts] == [
        {f"step-{step}", "latest"} for step in (1, 2, 3, 5)
    ]
    for step, artifact in enumerate(artifacts[:3], start=1):
        staged = {
            entry.path: Path(entry.local_path).read_bytes() for entry in artifact.manifest.contents
        }
        assert staged == {"rank-00000.safetensors": bytes([step]) * 1000, "meta.json": b"{}"}
    assert [entry.ref for entry in artifacts[3].manifest.contents] == [
        "s3://bucket/run/step-00000005"
    ]
    assert len(offline_rows(tmp_path)) == 3  # the one that failed has stopped nothing


def test_rows_that_follow_each_other_closely_do_not_list_the_checkpoints_each_time():
    listed: list[int] = []
    artifacts = CheckpointArtifacts(wandb, None, lambda: listed.append(1) or [])
    for _ in range(50):
        artifacts.look()
    artifacts.close(10)
    assert len(listed) == 2  # with the first row, and at the end


def test_artifacts_that_fail_or_hang_do_not_hold_up_the_end_of_a_run(
    caplog: pytest.LogCaptureFixture,
):
    CheckpointArtifacts(wandb, None, lambda: 1 / 0).close(10)
    assert "cannot list checkpoints for artifacts: division by zero" in caplog.text
    release, began = threading.Event(), time.monotonic()
    artifacts = CheckpointArtifacts(wandb, None, lambda: [str(release.wait(60))])
    artifacts.look()
    artifacts.close(0.1)
    assert time.monotonic() - began < 30
    assert all(
        thread.daemon for thread in threading.enumerate() if thread.name == "wandb-artifacts"
    )
    release.set()


def test_disabled_needs_no_package_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="disabled"), tmp_path, {}, list, {})
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MissingExtra, match=r"pip install .wandb>="):
        tracking.WandbTracker(WeightsAndBiases(mode="offline"), tmp_path, {}, list, {})


def test_auto_is_online_only_where_a_key_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb.teardown()  # settings of W&B are read once in a process
    assert tracking.resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 123\n")
    assert tracking.resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert tracking.resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "123")
    assert tracking.resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.resolve_mode("auto") == "disabled"
    assert tracking.resolve_mode("offline") == "offline"


@pytest.mark.parametrize("chosen", ["by default", "by variable", "by login"])
def test_a_key_that_wandb_login_has_stored_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
):
    own = "http://wandb.example.org:8080"
    if chosen == "by variable":
        monkeypatch.setenv("WANDB_BASE_URL", own)
    if chosen == "by login":  # wandb login --host
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "settings").write_text(f"[default]\nbase_url = {own}\n")
    wandb.teardown()  # settings of W&B are read once in a process
    try:
        default = wandb.Settings().base_url
        assert tracking.server() == (default if chosen == "by default" else own)
        wbauth = pytest.importorskip("wandb.sdk.lib.wbauth")
        wbauth.write_netrc_auth(host="https://elsewhere.example.org", api_key="0" * 40)
        assert tracking.resolve_mode("auto") == "offline"
        wbauth.write_netrc_auth(host=tracking.server(), api_key="0" * 40)
        assert tracking.resolve_mode("auto") == "online"
    finally:
        wandb.teardown()


def test_an_invalid_setting_of_wandb_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WANDB_BASE_URL", "wandb")
    tracker = tracking.WandbTracker(WeightsAndBiases(mode="auto"), tmp_path, {}, list, {})
    tracker.log(1, {"train/loss": 1.0})
    assert "Training continues" in caplog.text
    JsonlTracker(tmp_path / "metrics.jsonl").log(1, {})
    assert not tracking.holds(WeightsAndBiases(mode="auto"), tmp_path)
    assert not tracker.complete()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="mode"):
        decode(WeightsAndBiases, {"mode": "dryrun"}, "tracking.wandb")
