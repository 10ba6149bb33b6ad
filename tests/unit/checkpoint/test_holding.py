"""Retention beside readers: what is being read stays until it has been read."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import fork
from trainer.checkpoint import Checkpointer, Config, files, holding, integrity
from trainer.checkpoint.files import Location, Url
from trainer.storage import local


@pytest.fixture(params=["disk", "store"])
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
