"""`samestep checkpoint`: what it says of checkpoints, and which it removes."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import storage
from tests.integration.commands import Samestep
from tests.integration.test_strange_folders import seal
from trainer.checkpoint import Checkpointer, Config, files, integrity
from trainer.checkpoint.lock import only_writer
from trainer.checkpoint.meta import read_meta


@pytest.fixture(params=["folder", pytest.param("store", marks=pytest.mark.long)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Checkpoints of steps 1 to 4, all kept, and a save of step 5 that was cut short."""
    folder = tmp_path / "run" / "checkpoints"
    root = (
        files.location(request.getfixturevalue("s3_folder")) if request.param == "store" else folder
    )
    settings = Config(keep_last=2, keep_every=2)
    checkpointer = Checkpointer(root, Config(keep_every=1), rank=0, world_size=1)
    for step in range(1, 5):
        sections = {key: {} for key in ("model", "data", "objective", "training")}
        meta: dict[str, Any] = {
            "config": {**sections, "output": "runs/a", "checkpoint": vars(settings)}
        }
        checkpointer.save(step, {"model/weight": torch.ones(50)}, meta)
    checkpointer.wait()
    files.write(root / "step-00000005" / "rank-00001.safetensors", bytes(1000))
    return str(root) if request.param == "store" else str(folder.parent)


def root_of(run: str) -> files.Location:
    return files.location(run if storage.is_url(run) else f"{run}/checkpoints")


def saved(run: str) -> list[datetime]:
    """When the checkpoints of steps 1 to 4 were."""
    metas = (read_meta(integrity.step_folder(root_of(run), step)) for step in range(1, 5))
    return [datetime.fromisoformat(meta["saved"]) for meta in metas]


def damage(run: str, step: int) -> None:
    """Changes bytes of a step, but not how many there are."""
    root = root_of(run)
    file = root / f"step-{step:08d}" / "rank-00000.safetensors"
    files.write(file, bytes(files.size(file)))


def test_ls_and_verify(run: str, samestep: Samestep) -> None:
    damage(run, 3)
    before = datetime.now(UTC)
    table = samestep("checkpoint", "ls", run).out
    after = datetime.now(UTC)
    assert table.count("committed") == 4 + 1
    assert table.count("not committed") == 1
    ages = [
        60 * int(minutes) + int(seconds)
        for minutes, seconds in re.findall(r"\b0:(\d\d):(\d\d)\b", table)
    ]
    for age, at in zip(ages, saved(run), strict=True):
        assert (before - at).total_seconds() - 0.5 <= age <= (after - at).total_seconds() + 0.5
    verified = samestep("checkpoint", "verify", run)
    assert verified.code == 1
    assert verified.out.count("whole") == 3
    assert "step 3: " in verified.out
    assert "rank-00000.safetensors is damaged: its SHA-256" in verified.out


def test_gc_removes_what_retention_would_and_counts_whole_ones_only(
    run: str, samestep: Samestep
) -> None:
    damage(run, 4)
    announced = samestep("checkpoint", "gc", run, "--dry-run").out
    assert announced.count("would remove") == 3
    assert samestep("checkpoint", "ls", run).out.count("committed") == 5, "nothing has happened yet"
    assert samestep("checkpoint", "gc", run).out.replace("removed", "would remove") == announced
    table = samestep("checkpoint", "ls", run).out
    assert [line.split()[1] for line in table.splitlines() if "committed" in line] == [
        "2",
        "3",
        "4",
    ]
    assert samestep("checkpoint", "gc", run, "--keep-last", "2").out.startswith("removed 0 folders")


@pytest.mark.parametrize("run", ["folder"], indirect=True)
def test_gc_is_refused_while_a_training_writes_there(
    run: str, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WAIT", "RENEW"):
        monkeypatch.setattr(f"trainer.checkpoint.lock._{name}_SECONDS", 0.1)
    monkeypatch.setattr("trainer.checkpoint.lock.Owner.is_dead", False)  # the two are one process
    with only_writer(files.location(run if storage.is_url(run) else f"{run}/checkpoints")):
        refused = samestep("checkpoint", "gc", run)
        assert refused.code == 2
        assert "another training is running" in refused.message
        assert "would remove" in samestep("checkpoint", "gc", run, "--dry-run").out


@pytest.mark.parametrize("run", ["folder"], indirect=True)
def test_gc_keeps_at_least_two(run: str, samestep: Samestep) -> None:
    result = samestep("checkpoint", "gc", run, "--keep-last", "1")
    assert result.code == 2
    assert "keep_last is 1. Use 2 or more" in result.message
    assert samestep("checkpoint", "ls", run).out.count("committed") == 5


def test_what_is_no_run_is_refused(run: str, samestep: Samestep, tmp_path: Path) -> None:
    result = samestep("checkpoint", "ls", tmp_path / "nowhere")
    assert result.code == 1
    assert "nowhere is neither a run" in result.message
    step = f"{run if storage.is_url(run) else run + '/checkpoints'}/step-00000002"
    result = samestep("checkpoint", "verify", step)
    assert result.code == 1
    assert f"{step} is one checkpoint; name the run, or the folder of all: " in result.message


def test_a_damaged_lease_is_reported_and_gc_removes_nothing(
    tmp_path: Path, samestep: Samestep
) -> None:
    root = tmp_path / "run" / "checkpoints"
    for steps in ((1, 2), (3, 4)):
        with only_writer(root) as lease:
            checkpointer = Checkpointer(root, Config(), rank=0, world_size=1, lease=lease)
            checkpointer.continue_from(checkpointer.latest())
            for step in steps:
                checkpointer.save(step, {"model/weight": torch.ones(50)}, {})
            checkpointer.wait()
    newest = root / ".lease-00000002"
    newest.write_bytes(newest.read_bytes().replace(b'"step": 2', b'"step": 0'))
    verified = samestep("checkpoint", "verify", root)
    assert verified.code == 1
    assert f"{newest} is damaged" in verified.out
    assert samestep("checkpoint", "gc", root).out.endswith("removed 0 folders, 0 bytes\n")

    older = root / "step-00000001"  # of the first training: whether it counts is unknown now
    shutil.copytree(root / "step-00000003", older)
    (older / "LEASE").write_text("1")
    committed = (older / "COMMITTED").read_text()
    (older / "COMMITTED").write_text(committed.removesuffix("2") + "1")
    for command in ("verify", "gc"):
        refused = samestep("checkpoint", command, root)
        assert refused.code == 1
        assert f"{newest} is damaged, and it decides which" in refused.message
    assert len(list(root.glob("step-*"))) == 3


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"saved": "yesterday"}, "saved is 'yesterday', not a text like"),
        ({"saved": "2026-11-29T00:00:00"}, "saved is '2026-11-29T00:00:00', not a text like"),
    ],
)
def test_a_time_that_no_save_writes_is_damage(
    meta: dict[str, Any], message: str, tmp_path: Path, samestep: Samestep
) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", Config(), rank=0, world_size=1)
    checkpointer.save(1, {"x": torch.ones(2)}, {})
    checkpointer.wait()
    step = tmp_path / "checkpoints" / "step-00000001"
    file = step / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **meta}))
    seal(step)
    assert message in " ".join(samestep("checkpoint", "ls", tmp_path).out.split())


def test_gc_names_a_setting_of_a_wrong_type(tmp_path: Path, samestep: Samestep) -> None:
    sections: dict[str, Any] = {key: {} for key in ("model", "data", "objective", "training")}
    checkpointer = Checkpointer(tmp_path / "checkpoints", Config(), rank=0, world_size=1)
    config = {**sections, "output": "runs/a", "checkpoint": {"keep_last": "x"}}
    checkpointer.save(1, {"x": torch.ones(2)}, {"config": config})
    checkpointer.wait()
    result = samestep("checkpoint", "gc", tmp_path, "--dry-run")
    assert result.code == 2
    assert "checkpoint.keep_last" in result.message
