"""Which checkpoints count when several trainings have written in one folder, and their names."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError
from trainer.checkpoint import Checkpointer, Config, files, history, integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.history import Stretch
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.lock import only_writer

WEIGHTS = {"w": torch.ones(3)}


@pytest.fixture(params=["folder", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "store":
        return files.location(request.getfixturevalue("s3_folder"))
    return tmp_path


def training(root: Location, step: int | None = None) -> tuple[Checkpointer, Lease]:
    """One that takes over, and continues from a step; from the newest by default."""
    lease = Lease.take(root)
    assert lease is not None
    saver = Checkpointer(root, Config(), rank=0, world_size=1, lease=lease)
    saver.continue_from(saver.latest() if step is None else step)
    return saver, lease


def save(saver: Checkpointer, *steps: int) -> None:
    for step in steps:
        saver.save(step, WEIGHTS, {})
        saver.wait()


def commit_late(lease: Lease, step: int) -> Location:
    """What a training does that was frozen between its last look and its commit."""
    folder = lease.claim(step)
    digest = files.write(folder / "meta.json", b"{}")
    integrity.commit(folder, {"meta.json": digest}, lease.number)
    return folder


def test_the_example_of_the_module() -> None:
    stretches = [Stretch(3, float("inf")), Stretch(2, 8), Stretch(1, 4, or_lower=True)]
    written = {1: (2, 4, 6), 2: (6, 8, 9), 3: (10,), 4: (12,)}
    counted = {
        number: [step for step in steps if history.counts(stretches, step, number)]
        for number, steps in written.items()
    }
    assert counted == {1: [2, 4], 2: [6, 8], 3: [10], 4: []}


@pytest.mark.long
def test_a_late_commit_does_not_count_and_goes(
    root: Location, caplog: pytest.LogCaptureFixture
) -> None:
    first, frozen = training(root)
    save(first, 2, 4)
    second, _ = training(root)
    late = commit_late(frozen, 6)
    assert second.steps() == [2, 4]
    save(second, 6)
    assert second.steps() == [4, 6]
    assert integrity.step_folder(root, 6).name == "step-00000006-lease-2"
    assert late.name == "step-00000006"
    assert integrity.is_committed(late)  # a later holder may remove it, as nobody uses its name
    third, _ = training(root)
    assert third.steps() == [4, 6]
    with caplog.at_level(logging.WARNING):
        save(third, 8)
    assert "removed" in caplog.text
    assert not integrity.is_committed(late)
    assert integrity.step_folder(root, 8).name == "step-00000008"


def test_undisturbed_runs_keep_the_plain_names(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saver, lease = training(tmp_path)
        save(saver, step)
        assert lease.number == step
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000002",
        "step-00000003",
    ]
    # Leases that decide about no checkpoint any more are gone.
    assert len(list(tmp_path.glob(".lease-*"))) <= 3


def test_checkpoints_of_older_versions_are_continued(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path, Config(), rank=0, world_size=1), 1, 2)
    assert not list(tmp_path.glob(".lease-*"))
    saver, _ = training(tmp_path)
    assert saver.steps() == [1, 2]
    save(saver, 3)
    assert saver.steps() == [2, 3]


def test_leaving_out_a_damaged_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = training(tmp_path)
    save(first, 2, 4)
    (tmp_path / "step-00000004" / "rank-00000.safetensors").write_bytes(b"damaged")
    second, _ = training(tmp_path)
    assert second.steps() == [2]
    save(second, 4)
    assert second.steps() == [2, 4]
    assert second.latest() == 4
    assert integrity.step_folder(tmp_path, 4).name == "step-00000004-lease-2"


def test_the_name_of_a_save_that_was_interrupted_is_not_used_again(tmp_path: Path) -> None:
    """A rank on another machine may be frozen, and still write there."""
    _, killed = training(tmp_path)
    files.write(killed.claim(2) / "rank-00000.safetensors", b"one of two ranks")
    second, _ = training(tmp_path)
    save(second, 2)
    assert integrity.step_folder(tmp_path, 2).name == "step-00000002-lease-2"
    files.write(tmp_path / "step-00000002" / "rank-00001.safetensors", b"the other one, late")
    assert second.latest() == 2
    third, _ = training(tmp_path)
    save(third, 3)
    assert third.latest() == 3
    assert not (tmp_path / "step-00000002").exists()


def test_a_kill_while_the_folder_of_a_step_is_made_fails_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, killed = training(tmp_path)
    with monkeypatch.context() as patch:  # without the clean-up that a kill prevents
        patch.setattr(Path, "rename", lambda *_: 1 / 0)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            killed.claim(2)
    assert len(list(tmp_path.glob(f"{files.CLAIMING}*"))) == 1
    second, _ = training(tmp_path)
    save(second, 2, 4, 6)
    assert second.steps() == [4, 6]
    assert not list(tmp_path.glob(f"{files.CLAIMING}*"))


def test_a_save_that_fails_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver, _ = training(tmp_path)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise CheckpointError("no space")

        patch.setattr(integrity, "commit", fail)
        saver.save(2, WEIGHTS, {})
        with pytest.raises(CheckpointError, match="no space"):
            saver.wait()
    assert files.names(tmp_path / "step-00000002") == [history.NUMBER]
    save(saver, 2)
    assert saver.steps() == [2]


def test_a_folder_is_claimed_by_one(root: Location) -> None:
    files.make_folder(root)
    assert files.claim(root / "a", "LEASE", b"1")
    assert not files.claim(root / "a", "LEASE", b"2")
    assert files.read(root / "a" / "LEASE") == b"1"
    files.write(root / "b" / "rank-00000.safetensors", b"of an older version")
    assert not files.claim(root / "b", "LEASE", b"1")
    assert [name for name in files.names(root) if name.startswith(".")] == []


def test_a_lease_that_was_not_written_to_its_end(tmp_path: Path) -> None:
    """Its holder was killed, or wrote it on a full disk: it has decided nothing."""
    saver, _ = training(tmp_path)
    save(saver, 2)
    (tmp_path / history.lease_name(2)).touch()
    again, lease = training(tmp_path)
    assert lease.number == 3
    assert again.steps() == [2]


def test_a_save_does_not_read_the_leases_of_former_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_if_there = [], files.read_if_there

    def noted(path: Location) -> bytes | None:
        if path.name.startswith(".lease-"):
            read.append(path.name)
        return read_if_there(path)

    config = Config(keep_every=1)
    monkeypatch.setattr(files, "read_if_there", noted)
    for step in (1, 2, 3):
        read.clear()
        lease = Lease.take(tmp_path)
        assert lease is not None
        saver = Checkpointer(tmp_path, config, rank=0, world_size=1, lease=lease)
        saver.continue_from(saver.latest())
        own = history.lease_name(step)
        assert sorted({*read} - {own}) == sorted(name for name in read if name != own)
        assert {*read} >= {history.lease_name(number) for number in range(1, step)}
        read.clear()
        save(saver, step)
        assert read == []
    save(saver, 4, 5)
    assert read == []
    assert saver.steps() == [1, 2, 3, 4, 5]


def test_leases_without_checkpoints_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(5):
        with only_writer(tmp_path) as lease:
            pass
    assert lease.number == 5
    assert [path.name for path in tmp_path.glob(".lease-*")] == [history.lease_name(5)]
