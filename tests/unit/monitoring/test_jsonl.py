"""metrics.jsonl survives kills and goes back to where training continues."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import SamestepError
from trainer.monitoring.jsonl import JsonlTracker, read_rows


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_rows_hold_step_time_and_metrics(tmp_path: Path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(3, {"train/loss": 1.5, "train/lr": 1e-4})
    tracker.log(4, {"train/loss": math.inf})
    first, second = (
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )
    assert first.pop("time") > 1.7e9
    assert first == {"step": 3, "train/loss": 1.5, "train/lr": 1e-4}
    assert second["train/loss"] == math.inf
    tracker.close()


def test_a_place_in_a_file_has_no_rows(tmp_path: Path):
    """The output of some jobs of a study is one file."""
    (tmp_path / "scores.json").write_text("{}")
    assert list(read_rows(tmp_path / "scores.json" / "metrics.jsonl")) == []


def test_every_row_logged_before_a_sigkill_is_there(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, pathlib, sys; from trainer.monitoring.jsonl import JsonlTracker\n"
        "tracker = JsonlTracker(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 101): tracker.log(step, {'train/loss': 1 / step})\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([sys.executable, "-c", code, path], env=environment).returncode
        == -signal.SIGKILL
    )
    assert steps(path) == list(range(1, 101))


def test_resuming_removes_the_rows_that_will_be_made_again(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(1, 11):
        tracker.log(step, {"train/loss": 0.1 * step})
    tracker.log(10, {"heldout/loss": 2.0})
    tracker.close()
    before = path.read_bytes().splitlines()[:6]
    tracker = JsonlTracker(path, resume_step=6)
    assert path.read_bytes().splitlines() == before
    tracker.log(7, {})
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    tracker.close()
    JsonlTracker(path, resume_step=100).close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    JsonlTracker(path, resume_step=0).close()
    assert steps(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "damage",
    [b'{"step": 3, "train/lo', b"\x00\x00\x00", b"\xff\xfe\n", b"[1]\n", b"{}\n", b'"a"\n', b"\n"],
)
def test_torn_and_foreign_lines_are_removed_and_the_next_row_is_whole(
    tmp_path: Path, damage: bytes
):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time": 0}\n{"step": 2, "time": 0}\n' + damage)
    tracker = JsonlTracker(path, resume_step=5)
    tracker.log(3, {})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    tracker.close()


def test_reading_a_file_that_is_not_there_gives_nothing(tmp_path: Path):
    assert steps(tmp_path / "metrics.jsonl") == []


def test_rows_wait_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Training goes on; nothing is lost if there is room before the end, and at the end it is an
    error.
    """
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {})
    for first in (2, 4):
        usable, tracker._file = tracker._file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        tracker.log(first, {})
        tracker.log(first + 1, {})
        tracker._file.close()
        tracker._file = usable
        assert steps(path) == list(range(1, first))
        tracker.log(first + 1, {})
        assert steps(path)[-3:] == [first, first + 1, first + 1]
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert [record.message for record in caplog.records] == [
        f"rows of {path} wait in memory: No space left on device; free some space"
    ] * 2
    tracker.close()

    tracker = JsonlTracker(path)
    tracker._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    tracker.log(1, {})
    with pytest.raises(SamestepError, match="No space left on device; free some space"):
        tracker.close()


def test_what_a_checkpoint_refers_to_is_on_the_disk_if_there_is_room_again(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    tracker = JsonlTracker(path)
    usable, tracker._file = tracker._file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    tracker.log(1, {})
    tracker._file.close()
    tracker._file = usable
    tracker.sync()
    assert steps(path) == [1]


def test_a_folder_that_is_not_there_is_explained(tmp_path: Path):
    with pytest.raises(SamestepError, match="No such file or directory"):
        JsonlTracker(tmp_path / "none" / "metrics.jsonl")


def test_each_flipped_bit_of_a_name_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {"time": 0.5, "train/loss": 1.0, "train/lr": 0.1, "heldout/loss": 2.0}
    lines = [json.dumps({"step": step, **values}).encode() + b"\n" for step in range(4)]
    path.write_bytes(b"".join(lines))
    rows = list(read_rows(path))
    assert rows == [{"step": step, **values} for step in range(4)]
    assert caplog.messages == []
    of_names = [byte for name in ("step", *values) for byte in spans(lines[2], f'"{name}"')]
    for byte, bit in itertools.product(of_names, range(8)):
        line = bytearray(lines[2])
        line[byte] ^= 1 << bit
        path.write_bytes(b"".join([*lines[:2], line, lines[3]]))
        list(read_rows(path))
        assert f"{path}, line 3 " in caplog.text, line
        caplog.clear()


def spans(line: bytes, text: str) -> range:
    first = line.index(text.encode())
    return range(first, first + len(text))
