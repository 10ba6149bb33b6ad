"""Saving, walking back over damage, restoring and keeping, in one process."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.errors import CheckpointError, ConfigError
from trainer.checkpoint import Checkpointer, Config, files, integrity, read_meta
from trainer.checkpoint.meta import best_step


def tensors(value: float = 0.0) -> dict[str, Tensor]:
    return {
        "model/weight": torch.full((5, 3), float(value)),
        "optimizer/exp_avg/weight": torch.full((5, 3), -float(value)),
    }


def open_at(folder: Path, **config: Any) -> Checkpointer:
    return Checkpointer(folder, Config(**config), rank=0, world_size=1)


def save(folder: Path, *steps: int, **config: Any) -> Checkpointer:
    checkpointer = open_at(folder, **config)
    for step in steps:
        checkpointer.save(step, tensors(step), {"order": step})
    checkpointer.wait()
    return checkpointer


def restored(folder: Path, step: int | None = None) -> float:
    """The value that every element of the restored tensors has."""
    found = tensors(float("nan"))
    open_at(folder).restore(found, step)
    value = float(found["model/weight"][0, 0])
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(value).items())
    return value


def only_file(folder: Path, step: int, name: str) -> Path:
    return folder / f"step-{step:08d}" / name


@pytest.mark.parametrize("asynchronous", [True, False])
def test_restores_what_was_saved_whatever_happened_to_it_since(
    tmp_path: Path, asynchronous: bool
) -> None:
    checkpointer = open_at(tmp_path, asynchronous=asynchronous)
    live = tensors(7)
    checkpointer.save(7, live, {"data": {"example": 2**63 - 1}, "ledger": None})
    for tensor in live.values():
        tensor.zero_()
    checkpointer.wait()
    meta = open_at(tmp_path).restore(live)
    assert torch.equal(live["model/weight"], tensors(7)["model/weight"])
    assert meta["step"] == 7
    assert meta["data"] == {"example": 2**63 - 1}
    assert meta["ledger"] is None
    assert meta["world_size"] == 1
    assert read_meta(tmp_path / "step-00000007") == meta
    opened, stored = open_at(tmp_path).open(tmp_path / "step-00000007")
    assert opened == meta
    assert stored.keys() == live.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors(7).items())


def test_restores_into_parameters_that_require_gradients(tmp_path: Path) -> None:
    save(tmp_path, 4)
    live = tensors()
    parameter = torch.nn.Parameter(live["model/weight"])
    open_at(tmp_path).restore(live | {"model/weight": parameter})
    assert torch.equal(parameter.detach(), torch.full((5, 3), 4.0))


def test_nothing_saved_is_not_an_error_until_it_is_to_be_restored(tmp_path: Path) -> None:
    checkpointer = open_at(tmp_path / "new" / "checkpoints")
    assert checkpointer.latest() is None
    assert checkpointer.steps() == []
    checkpointer.wait()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpointer.restore(tensors())
    with pytest.raises(CheckpointError, match="step-00000005 was never committed"):
        checkpointer.restore(tensors(), step=5)


def test_retention_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    assert save(tmp_path, *range(1, 11), keep_last=3, keep_every=4).steps() == [4, 8, 9, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step:08d}" for step in (4, 8, 9, 10)
    ]


def test_retention_keeps_the_best_until_another_one_is_committed(tmp_path: Path) -> None:
    checkpointer = open_at(tmp_path, keep_last=2)
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, 5), (8, 5)):
        record = {"metric": "loss", "lowest": True, "step": best, "value": 1.0, "since": best}
        checkpointer.save(step, tensors(step), {"best": record}, kept=best)
        checkpointer.wait()
        assert checkpointer.holds(best)
        assert best_step(tmp_path) == best
        assert checkpointer.steps() == sorted({max(1, step - 1), step, best})


def test_retention_counts_sound_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    only_file(tmp_path, 3, "rank-00000.safetensors").unlink()
    assert save(tmp_path, 4).steps() == [2, 3, 4], "3 does not count, so 2 stays"
    assert restored(tmp_path) == 4


def test_retention_looks_at_the_newest_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that keeps many milestones does not look at all of them with every save."""
    save(tmp_path, *range(1, 8), keep_every=1)
    looked_at, check_sizes = [], integrity.check_sizes
    monkeypatch.setattr(
        integrity,
        "check_sizes",
        lambda folder: (looked_at.append(folder.name), check_sizes(folder)),
    )
    assert save(tmp_path, 8, keep_every=1).steps() == list(range(1, 9))
    assert looked_at == ["step-00000008", "step-00000007"]


def test_a_save_does_not_look_into_all_checkpoints_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_into, read_if_there = [], files.read_if_there

    def noted(path: Path) -> bytes | None:
        if path.name == "COMMITTED":
            looked_into.append(int(path.parent.name[-8:]))
        return read_if_there(path)

    checkpointer = save(tmp_path, *range(1, 8), keep_every=1)
    monkeypatch.setattr(files, "read_if_there", noted)
    checkpointer.save(8, tensors(8), {})
    checkpointer.wait()
    assert looked_into == [8, 8, 7], "8 is new, and the files of the newest two are compared"


def test_the_last_step_is_saved_again_after_it_was_discarded(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 1, 2)
    checkpointer.discard_after(1)
    assert checkpointer.steps() == [1]
    checkpointer.save(2, tensors(2), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]


def test_a_step_that_was_removed_is_a_new_one_when_it_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = save(tmp_path, 1, 2, 3, keep_last=3)
    checkpointer.restore(tensors(), 2)
    checkpointer.discard_after(2)
    with monkeypatch.context() as patch:  # a save of step 3 that leaves an uncommitted folder
        patch.setattr(integrity, "remove_step", lambda _: None)
        patch.setattr(integrity, "commit", lambda *_: 1 / 0)
        checkpointer.save(3, tensors(3), {})
        checkpointer.settle()
    assert (tmp_path / "step-00000003").exists()
    checkpointer.save(4, tensors(4), {})
    checkpointer.wait()
    assert not (tmp_path / "step-00000003").exists(), "an interrupted save"
    assert checkpointer.steps() == [1, 2, 4]


def test_each_file_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the newest checkpoint, then opening it, reads it through once.

    Reading needs no more than its rows.
    """
    save(tmp_path, 1, 2)
    verified, digest = [], files.digest
    monkeypatch.setattr(files, "digest", lambda path: (verified.append(path.name), digest(path))[1])
    checkpointer = open_at(tmp_path)
    assert checkpointer.latest() == 2
    _, stored = checkpointer.open(tmp_path / "step-00000002")
    assert torch.equal(stored.elements("model/weight", 4, 9), torch.full((5,), 2.0))
    assert verified.count("rank-00000.safetensors") == 1


@pytest.mark.parametrize(
    ("code", "is_damage"),
    [
        (errno.ESTALE, False),
        (errno.EMFILE, False),
        (errno.EACCES, False),
        (errno.EIO, True),
        (errno.ENOENT, True),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_damage: bool
) -> None:
    """Continuing from an older step would remove the newest one, whose bytes are whole."""
    save(tmp_path, 1, 2)
    unreadable, open_regular = only_file(tmp_path, 2, "rank-00000.safetensors"), files.open_regular

    def fail(path: Path) -> Any:
        if path == unreadable:
            raise OSError(code, os.strerror(code))
        return open_regular(path)

    monkeypatch.setattr(files, "open_regular", fail)
    if is_damage:
        assert open_at(tmp_path).latest() == 1
    else:
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            open_at(tmp_path).latest()
    monkeypatch.undo()
    assert restored(tmp_path) == 2


def test_going_back_reads_again_what_was_read_long_ago(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 1, 2, 3, keep_last=3)
    assert checkpointer.latest(most=2) == 2
    damaged = only_file(tmp_path, 2, "rank-00000.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert checkpointer.latest(most=2) == 1


@pytest.mark.parametrize("fields", [{"every": 0}, {"keep_last": 1}, {"keep_every": 0}])
def test_nonsense_in_the_config_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(fields))} is \d"):
        Config(**fields)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "meta.json", "checksums.json", "COMMITTED"]
)
def test_damage_is_named_and_walked_back_over(
    name: str, harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3, keep_last=3)
    harm(only_file(tmp_path, 3, name))
    with caplog.at_level(logging.WARNING):
        assert open_at(tmp_path).latest() == 2
    assert "step-00000003" in caplog.text
    assert name in caplog.text or name == "COMMITTED"
    assert restored(tmp_path) == 2
    for use in (read_meta, open_at(tmp_path).open):
        if use is not read_meta or name != "rank-00000.safetensors":
            with pytest.raises(CheckpointError):
                use(tmp_path / "step-00000003")

    assert save(tmp_path, 3).steps()[-1] == 3, "the run, going on from 2, saves 3 anew"
    assert restored(tmp_path) == 3


def test_a_run_does_not_start_anew_when_all_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_bit(only_file(tmp_path, step, "rank-00000.safetensors"))
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints in .* are damaged"):
        open_at(tmp_path).latest()


def test_going_on_from_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep_last=9)
    checkpointer = open_at(tmp_path, keep_last=9)
    checkpointer.restore(tensors(), step=1)
    checkpointer.save(2, tensors(20), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert restored(tmp_path) == 20


def test_saving_the_same_step_again_does_nothing(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 1)
    before = only_file(tmp_path, 1, "COMMITTED").stat().st_mtime_ns
    checkpointer.save(1, tensors(1), {})
    again = open_at(tmp_path)
    again.restore(tensors())
    again.save(1, tensors(1), {})
    again.wait()
    assert only_file(tmp_path, 1, "COMMITTED").stat().st_mtime_ns == before


def test_leftovers_of_a_crash_are_cleaned_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for leftover in ("step-00000002", "step-00000009"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "rank-00003.json").write_text("{}")
    (tmp_path / "step-2").mkdir()
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-2",
    ]
    assert sorted(path.name for path in (tmp_path / "step-00000002").iterdir()) == [
        "COMMITTED",
        "checksums.json",
        "meta.json",
        "rank-00000.safetensors",
    ]


def test_another_model_leaves_the_tensors_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    other = {"model/weight": torch.zeros(5, 4), "model/bias": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"another model.*1 missing in it: model/bias"):
        open_at(tmp_path).restore(other)
    assert not other["model/weight"].any()


def test_a_format_from_the_future_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.writer.FORMAT", 2)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match="has checkpoint format 2 and this samestep reads format 1"
    ):
        restored(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_at_the_first_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot write in .*file/checkpoints/step-00000001: Not a directory"
    ):
        save(tmp_path / "file" / "checkpoints", 1)


def test_saves_that_fail_are_warned_of_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = save(tmp_path / "run", 1)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("")
    for step in (2, 3):
        checkpointer.save(step, tensors(step), {})
        checkpointer.settle()
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "saving step-00000002 failed: cannot read" in said[0]
    assert "tries again (2 saves in a row have failed)" in said[1]
    with pytest.raises(
        CheckpointError, match=r"step-00000003 failed: cannot .* .*run: Not a directory"
    ):
        checkpointer.wait()
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    checkpointer.save(3, tensors(3), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


def test_a_full_disk_is_named_and_nothing_of_the_failed_save_stays(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on, with the checkpoint before it, and a save that has room again succeeds."""
    run = small_disk / "run"
    checkpointer = save(run, 1)
    free = shutil.disk_usage(small_disk).free
    checkpointer.save(2, {"model/weight": torch.zeros(10**6)}, {})
    checkpointer.settle()
    assert "step-00000002 failed" in caplog.text
    assert "rank-00000.safetensors: No space left" in caplog.text
    assert files.names(run) == ["step-00000001"]
    assert shutil.disk_usage(small_disk).free == free
    with pytest.raises(CheckpointError, match=r"failed: .*free some.*readable"):
        checkpointer.wait()
    assert restored(run) == 1
    checkpointer.save(3, tensors(3), {})
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


def test_a_failed_write_leaves_the_former_content_and_nothing_else(small_disk: Path) -> None:
    files.write(small_disk / "file", b"for", b"", b"mer")
    with pytest.raises(CheckpointError, match="No space left"):
        files.write(small_disk / "file", bytes(10**6))
    assert files.names(small_disk) == ["file"]
    assert files.read(small_disk / "file") == b"former"


def test_going_back_to_a_step(tmp_path: Path) -> None:
    """The newest sound step up to another.

    When later ones have been discarded, a restart finds it, too.
    """
    checkpointer = save(tmp_path, 2, 4, 6, 8, keep_last=9)
    corrupt_later = only_file(tmp_path, 4, "meta.json")
    corrupt_later.write_bytes(corrupt_later.read_bytes() + b" ")
    assert [checkpointer.latest(most=most) for most in (9, 8, 7, 5, 1)] == [8, 8, 6, 2, None]
    checkpointer.discard_after(6)
    assert checkpointer.steps() == [2, 4, 6]
    assert open_at(tmp_path).latest() == 6
