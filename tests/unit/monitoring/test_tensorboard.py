"""TensorBoard's own reader finds each step of metrics.jsonl once, whatever was killed."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import MissingExtra
from trainer.monitoring import tensorboard as tracking
from trainer.monitoring.jsonl import JsonlTracker, read_rows

pytest.importorskip("tensorboard")

CHILD = """
import os, sys
from pathlib import Path
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.tensorboard import TensorBoardTracker

folder, first, last, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
trackers = [JsonlTracker(folder / "metrics.jsonl", resume_step=first - 1), TensorBoardTracker(folder, {"seed": 7})]
for step in range(first, last + 1):
    for tracker in trackers:
        tracker.log(step, {"train/loss": 1 / step, "train/lr": 0.5})
        if step % 5 == 0:
            tracker.log(step, {"heldout/loss": 2 / step})
if end == "kill":
    os.kill(os.getpid(), 9)
for tracker in trackers:
    tracker.close()
"""  # noqa: E501


def run_steps(folder: Path, first: int, last: int, end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [sys.executable, "-c", CHILD, str(folder), str(first), str(last), end]
    assert subprocess.run(arguments, env=environment).returncode == (
        -signal.SIGKILL if end == "kill" else 0
    )


def steps_in(file: Path) -> list[int]:
    """The steps of an event file; the first one is of the configuration."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value]


@pytest.mark.long
def test_no_step_is_doubled_or_missing_after_kills_and_resumes(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path, 1, 10, "kill")
    run_steps(tmp_path, 7, 14, "close")  # from a checkpoint before the kill
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    loss = events.Scalars("loss/train_loss")
    assert [event.step for event in loss] == list(range(1, 15))
    assert [event.value for event in loss] == pytest.approx([1 / step for step in range(1, 15)])
    assert [event.step for event in events.Scalars("loss/heldout_loss")] == [5, 10]
    assert len(events.Scalars("train/lr")) == 14
    times = {
        row["step"]: row["time"]
        for row in read_rows(tmp_path / "metrics.jsonl")
        if "train/loss" in row
    }
    assert [event.wall_time for event in loss[:6]] == pytest.approx(
        [times[step] for step in range(1, 7)], abs=0.01
    )
    assert "seed: 7" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    (file,) = (
        tmp_path / "tensorboard"
    ).iterdir()  # readers that purge nothing see nothing twice either
    assert len(steps_in(file)) == 1 + 14 + 2


def test_a_disk_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    JsonlTracker(tmp_path / "metrics.jsonl").close()
    tracker = tracking.TensorBoardTracker(tmp_path, {})
    for step in range(3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    assert ["Training continues" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("full", [range(5, 15), range(20, 21)])
def test_what_a_full_disk_has_taken_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: range
):
    from tensorboard.summary.writer.record_writer import RecordWriter

    jsonl = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker, write, written = tracking.TensorBoardTracker(tmp_path, {}), RecordWriter.write, []

    def write_if_there_is_room(self: RecordWriter, data: bytes) -> None:
        written.append(data)
        if len(written) in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", write_if_there_is_room)
    for step in range(1, 21):
        for each in (jsonl, tracker):
            each.log(step, {"train/loss": 1 / step})
    for each in (jsonl, tracker):
        each.close()
    assert not tracking.holds(tmp_path)
    monkeypatch.undo()
    assert tracker.complete()
    assert tracking.holds(tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert steps_in(file) == list(range(21))
    file.unlink()
    assert not tracking.holds(tmp_path)


def test_without_the_package_the_extra_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtra, match=r"pip install .tensorboard>="):
        tracking.TensorBoardTracker(tmp_path, {})
