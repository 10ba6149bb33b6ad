"""Writers of files on a file system of which one operation fails, each one in turn.

Either the file is as before, nothing is left behind and the error names the file and the fix; or
the writer has got over it with a warning, where that is promised.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.format.writing import write_shard
from samestep.errors import SamestepError, fix_of
from samestep.storage import json_lines, write_text
from tests.failing_files import ERRORS, contents, each_failure, failing
from trainer.checkpoint import Checkpointer, Config, files
from trainer.checkpoint.huggingface import save_folder
from trainer.inference.features import new_array
from trainer.monitoring.jsonl import JsonlTracker, read_rows

Writer: TypeAlias = Callable[[Path, int], None]
"""Writes a version of its file in a folder."""


def text(folder: Path, version: int) -> None:
    write_text(folder / "below" / "file.txt", f"version {version}")


def rows(folder: Path, version: int) -> None:
    json_lines.write(folder / "predictions.jsonl.gz", [{"row": version}] * 3)


def created(folder: Path, version: int) -> None:
    files.create(folder / f"created-{version}", b"content")


def claimed(folder: Path, version: int) -> None:
    files.claim(folder / f"step-{version}", "LEASE", b"content")


def array(folder: Path, version: int) -> None:
    with new_array(folder / "features.npy", (3,), np.float32) as values:
        values[:] = version


def shard(folder: Path, version: int) -> None:
    documents = [np.full(5, version, np.uint16)]
    write_shard(folder / "a.tar", documents, np.zeros((1, 2), np.uint32), np.dtype(np.uint16))


def exported(folder: Path, version: int) -> None:
    save_folder(folder / f"model-{version}", {"version": version}, {"x": torch.zeros(2)}, card="x")


def manifest(folder: Path, version: int) -> None:
    splits: dict[str, tuple[ShardInfo, ...]] = {"train": ()}
    Manifest(1, "x", version, "uint16", {}, (), 0, {}, splits, {}).save(folder)


def row_of_metrics(folder: Path, version: int) -> None:
    """Opens the file anew, as a continued run does: later rows are removed."""
    tracker = JsonlTracker(folder / "metrics.jsonl", 1)
    tracker.close()


WRITERS: tuple[Writer, ...] = (
    *(text, rows, created, claimed, array, shard, exported, manifest, row_of_metrics),
)


@pytest.mark.parametrize("write", WRITERS)
def test_a_writer_leaves_the_former_files_or_the_new_ones(write: Writer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def former() -> dict[str, bytes]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(folder, 1)
        return contents(folder)

    former()
    write(folder, 2)
    complete = contents(folder)
    before = former()

    def check(what: str, error: OSError, raised: Exception | None) -> None:
        found = contents(folder)
        assert found in (before, complete), what
        if raised is None:  # the content was durable before
            assert found == complete, what
        elif isinstance(raised, OSError):  # the command line adds the fix
            assert str(folder) in str(raised.filename), what
        else:
            assert isinstance(raised, SamestepError), what
            assert fix_of(error) in str(raised), what
            assert str(folder) in str(raised), what
        former()

    assert each_failure(folder, lambda: write(folder, 2), check) >= 2


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_warns_and_the_next_one_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, Config(), rank=0, world_size=1)
    steps = iter(range(1, 1000))

    def save() -> None:
        step = next(steps)
        checkpointer.save(step, {"x": torch.full((5,), float(step))}, {})
        checkpointer.settle()

    save()

    def check(what: str, error: OSError, raised: Exception | None) -> None:
        assert raised is None, what
        failed = checkpointer.failed
        if failed is not None:
            assert fix_of(error) in caplog.text, what
            assert "the next save tries again" in caplog.text, what
        caplog.clear()
        assert checkpointer.steps(), what
        assert checkpointer.latest() == checkpointer.steps()[-1], what
        save()
        assert checkpointer.failed is None, what
        names = [name for name in contents(tmp_path) if ".tmp" in name]
        assert not names, what

    assert each_failure(tmp_path, save, check) >= 10


@pytest.mark.parametrize("error", ERRORS)
def test_rows_of_metrics_wait_for_the_disk(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2, 3):  # 0 is the opening of the file
        with failing(tmp_path, number, error) as state:
            tracker = JsonlTracker(path, resume_step=None)
            for step in (1, 2, 3):
                tracker.log(3 * number + step, {"loss": 1.0})
            tracker.close()
        assert state.failed is not None
        assert fix_of(OSError(error, "x")) in caplog.text
    assert [row["step"] for row in read_rows(path)] == list(range(4, 13))
