"""A damaged small file never makes a run start anew, and nothing is removed because of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError
from trainer.checkpoint import Checkpointer, Config, files, history, integrity, removal
from trainer.checkpoint.files import Location
from trainer.checkpoint.lock import Owner, only_writer

WEIGHTS = {"w": torch.ones(3)}
KEPT = Config(keep_last=2, keep_every=4)


def train(root: Location, *steps: int) -> int | None:
    """Continues from the newest checkpoint; returns its step."""
    with only_writer(root) as lease:
        saver = Checkpointer(root, KEPT, rank=0, world_size=1, lease=lease)
        newest = saver.latest()
        saver.continue_from(newest)
        for step in steps:
            saver.save(step, WEIGHTS, {"config": {"checkpoint": vars(KEPT)}})
            saver.wait()
        return newest


def trainings(root: Location, *histories: tuple[int, ...]) -> None:
    """One training after the other, each of which saves some steps; retention removes step 2."""
    for steps in histories:
        train(root, *steps)


def to_remove(root: Location) -> set[str]:
    """What `samestep checkpoint gc` would remove."""
    outdated = removal.outdated_steps(root, 2, 4, integrity.check_content)
    going = [*integrity.uncommitted_folders(root), *integrity.superseded_folders(root)]
    return {folder.name for folder in going} | {
        integrity.step_folder(root, step).name for step in outdated
    }


def newest(root: Location) -> int | None:
    return Checkpointer(root, KEPT, rank=0, world_size=1).latest()


def flip(content: bytes, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def damages(content: bytes, every: int) -> Iterator[bytes]:
    """The content with one bit flipped, for every n-th bit and the last eight, and no content."""
    bits = 8 * len(content)
    for bit in {*range(0, bits, every), *range(bits - 8, bits)}:
        yield flip(content, bit)
    yield b""


@pytest.mark.parametrize(
    "history",
    [
        [(2, 4, 6)],
        [(2,), (6, 8, 10)],
        [(2, 4), (6, 8)],
        [(2, 4), (6, 8), ()],  # the last one was killed before its first save
    ],
)
@pytest.mark.parametrize("every", [83, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_each_bit_of_each_small_file(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    history: list[tuple[int, ...]],
    every: int,
) -> None:
    trainings(tmp_path, *history)
    clean, removed = newest(tmp_path), to_remove(tmp_path)
    assert clean is not None
    last = integrity.step_folder(tmp_path, clean)
    names = {".lease-*": 1, "step-*/LEASE": 2, "step-*/COMMITTED": 2, "step-*/checksums.json": 2}
    for pattern, least in names.items():
        paths = sorted(tmp_path.glob(pattern))
        assert len(paths) >= least
        for path in paths:
            content = path.read_bytes()
            for damaged in damages(content, min(every, len(content))):
                path.write_bytes(damaged)
                caplog.clear()
                error, chosen = "", None
                try:
                    chosen = newest(tmp_path)
                    assert to_remove(tmp_path) <= removed, (path, damaged)
                except CheckpointError as refused:
                    error = str(refused)
                path.write_bytes(content)
                if error:
                    assert str(path.parent) in error, (error, damaged)
                    assert path.name in error, (error, damaged)
                    continue
                # A step whose checksums differ is skipped, and the warning names it.
                skipped = (
                    path.parent == last
                    and f"skipping the checkpoint of step {clean}" in caplog.text
                )
                assert chosen == (clean - 2 if skipped else clean), (path, damaged)


@pytest.mark.parametrize("damaged", [b"", b"{", b"\x00" * 150])
def test_a_training_continues_where_a_damaged_lease_leaves_no_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    trainings(tmp_path, (2,), (6, 8))  # no checkpoint of the first training is left
    (tmp_path / ".lease-00000002").write_bytes(damaged)
    assert train(tmp_path, 10) == 8
    assert f"{tmp_path}/.lease-00000002 is damaged" in caplog.text
    assert integrity.committed_steps(tmp_path) == [8, 10]
    assert train(tmp_path) == 10


def test_a_training_does_not_begin_where_a_damaged_lease_leaves_doubt(tmp_path: Path) -> None:
    trainings(tmp_path, (2, 4), (6, 8), ())
    lease = tmp_path / ".lease-00000002"
    lease.write_bytes(flip(lease.read_bytes(), 77))
    before = {path for path in tmp_path.rglob("*") if path.name != ".lock"}
    with pytest.raises(
        CheckpointError, match=r"lease-00000002 is damaged.*Restore it .* remove it"
    ):
        train(tmp_path, 10)
    assert {path for path in tmp_path.rglob("*") if path.name != ".lock"} == before
    lease.unlink()  # as the message says
    assert train(tmp_path, 10) == 8
    assert integrity.committed_steps(tmp_path) == [4, 8, 10]
    assert integrity.superseded_folders(tmp_path) == []


def test_leases_that_are_lost_take_no_checkpoint_with_them(tmp_path: Path) -> None:
    """As in a copy of the folder without hidden files."""
    trainings(tmp_path, (2, 4), (6, 8), ())
    for path in tmp_path.glob(".lease-*"):
        path.unlink()
    assert train(tmp_path, 10) == 8
    assert integrity.committed_steps(tmp_path) == [4, 8, 10]
    assert [path.name for path in tmp_path.glob(".lease-*")] == [history.lease_name(3)]


def without_checksum(path: Path) -> dict[str, object]:
    """Makes a lease one of an older version."""
    values: dict[str, object] = json.loads(path.read_bytes())
    values.pop("checksum", None)
    path.write_text(json.dumps(values))
    return values


def test_leases_of_older_versions(tmp_path: Path) -> None:
    trainings(tmp_path, (2, 4), (6, 8), ())
    for path in tmp_path.glob(".lease-*"):
        without_checksum(path)
    assert newest(tmp_path) == 8
    assert to_remove(tmp_path) == set()
    last = tmp_path / ".lease-00000003"
    last.write_text(json.dumps({**without_checksum(last), "step": -1}))
    with pytest.raises(CheckpointError, match="lease-00000003 names step -1, which is not there"):
        train(tmp_path, 1)
    assert len(list(tmp_path.glob("step-*"))) == 3


@pytest.mark.long
def test_in_an_object_store(s3_folder: str) -> None:
    root = files.location(s3_folder)
    trainings(root, (4,), (6, 8))
    lease = root / ".lease-00000002"
    files.write(lease, flip(files.read(lease), 77))
    for look in (newest, to_remove):
        with pytest.raises(CheckpointError, match=f"{lease} is damaged"):
            look(root)


def test_an_owner_s_note_with_a_flipped_bit_does_not_make_the_owner_dead(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        content = (tmp_path / ".owner").read_bytes()
    owner = Owner.parse(content)
    for damaged in damages(content, 1):
        found = Owner.parse(damaged)
        assert found == owner or not (found.is_here or found.is_dead), damaged
