"""Retention beside readers: what is being read stays until it has been read."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from samestep.storage import local
from tests.processes import fork
from trainer.checkpoint import Checkpointer, Config, files, holding, integrity, removal
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.urls import Url


@pytest.fixture(params=["disk", pytest.param("store", marks=pytest.mark.long)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    if request.param == "disk":
        yield tmp_path
    else:
        yield Url(request.getfixturevalue("s3_folder"))


def open_at(root: Location, holds: bool = False) -> Checkpointer:
    return Checkpointer(root, Config(keep_last=2), rank=0, world_size=1, holds=holds)


def save(writer: Checkpointer, *steps: int) -> list[int]:
    for step in steps:
        writer.save(step, {"x": torch.full((3,), float(step))}, {})
        writer.wait()
    return writer.steps()


@pytest.mark.long
def test_retention_waits_for_readers(root: Location) -> None:
    writer, reader = open_at(root), open_at(root, holds=True)
    save(writer, 1, 2)
    newest = reader.latest()
    assert newest == 2
    meta, stored = reader.open(integrity.step_folder(root, newest))
    assert save(writer, 3, 4, 5) == [2, 4, 5]
    assert stored["x"].tolist() == [2.0] * 3
    assert meta["step"] == 2
    del reader
    gc.collect()
    assert save(writer, 6) == [5, 6]
    assert not [name for name in files.names(root) if name.startswith(".reading-")]


def take_over(root: Location, step: int) -> Checkpointer:
    """A later training, which continues from a step."""
    lease = Lease.take(root)
    assert lease is not None
    writer = Checkpointer(root, Config(keep_last=3), rank=0, world_size=1, lease=lease)
    writer.continue_from(step)
    return writer


def test_abandoned_steps_stay_until_they_have_been_read(root: Location) -> None:
    save(open_at(root), 1)
    save(take_over(root, 1), 2, 3)
    abandoned = integrity.step_folder(root, 3)
    hold = holding.Hold(abandoned)
    writer = take_over(root, 1)
    assert save(writer, 2) == [1, 2]
    assert [each.name for each in integrity.superseded_folders(root)] == [abandoned.name]
    hold.release()
    assert save(writer, 3) == [1, 2, 3]
    assert not integrity.superseded_folders(root)


@pytest.mark.parametrize("releases", [True, False])
def test_a_rewind_waits_for_readers_but_not_for_ever(
    root: Location,
    releases: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restart must not continue from the steps that it removes."""
    monkeypatch.setattr(removal, "_READ_SECONDS", 60 if releases else 0.2)
    monkeypatch.setattr(removal, "_LOOK_SECONDS", 0.05)
    save(open_at(root), 1)
    writer = take_over(root, 1)
    save(writer, 2)
    hold = holding.Hold(integrity.step_folder(root, 2))
    with ThreadPoolExecutor(1) as thread:
        rewound = thread.submit(writer.discard_after, 1)
        if releases:
            time.sleep(0.3)
            assert writer.steps() == [1, 2]
            hold.release()
        rewound.result(30)
    assert writer.steps() == [1]
    assert ("still being read" in caplog.text) is not releases
    hold.release()


@pytest.mark.long
def test_the_hold_of_a_killed_reader_ends(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_at(root)
    save(writer, 1, 2)

    if (child := fork()) == 0:
        hold = holding.Hold(integrity.step_folder(root, 1))
        os.kill(os.getpid(), signal.SIGKILL if hold.release.alive else signal.SIGABRT)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    monkeypatch.setattr(holding, "_STALE_SECONDS", 0.0)
    save(writer, 3, 4)
    assert save(writer, 5) == [4, 5]
    assert not [name for name in files.names(root) if name.startswith(".reading-")]


def test_the_clock_of_a_reader_does_not_matter(
    s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, now = Url(s3_folder), time.time()
    save(open_at(root), 1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now - 10 * 86_400)
        hold = holding.Hold(integrity.step_folder(root, 1))
    holds = holding.Holds(root)
    assert holds.held() == {"step-00000001"}
    monkeypatch.setattr(holding, "_STALE_SECONDS", -0.5)  # as if it had been killed long ago
    assert holds.held(certain=True) == set()
    hold.release()


def test_a_step_is_not_removed_while_one_of_its_files_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, an open file stays in its folder under another name."""
    writer = open_at(tmp_path)
    save(writer, 1, 2)
    open_in_folder: list[str] = []
    remove = integrity.remove_step

    def look(folder: Location) -> None:
        links = filter(Path.is_symlink, Path("/proc/self/fd").iterdir())
        open_in_folder.extend(name for name in map(os.readlink, links) if str(folder) in name)
        remove(folder)

    monkeypatch.setattr(integrity, "remove_step", look)
    assert save(writer, 3, 4) == [3, 4]
    assert open_in_folder == []


def test_what_is_being_removed_cannot_be_held(tmp_path: Path) -> None:
    save(open_at(tmp_path), 1)
    folder = integrity.step_folder(tmp_path, 1)
    with holding.unless_held(folder) as free:
        assert free
        late = holding.Hold(folder)
    with holding.unless_held(folder) as free:
        assert free
    late.release()
    held = holding.Hold(folder)
    with holding.unless_held(folder) as free:
        assert not free
    held.release()


def test_a_reader_that_may_not_write_holds_nothing(
    s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(open_at(Url(s3_folder)), 1)

    def reject(*_: object) -> None:
        raise local.StorageError("forbidden")

    monkeypatch.setattr(files, "write", reject)
    assert not holding.Hold(Url(f"{s3_folder}/step-00000001")).release.alive
    assert holding.Holds(Url(s3_folder)).held() == set()
