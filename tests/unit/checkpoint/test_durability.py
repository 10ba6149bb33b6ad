"""What a power cut may take: names and contents that nothing has made durable yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import Checkpointer, Config


def test_all_else_is_durable_before_a_step_counts_as_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's content by its own fsync, before it gets its name; a name by fsync of its folder."""
    synced: set[Path] = set()
    at_stake: set[Path] = set()
    when_committed: list[set[Path]] = []
    fsync, replace, mkdir = os.fsync, os.replace, os.mkdir

    def observed_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.add(path)
        at_stake.difference_update([name for name in at_stake if name.parent == path])

    def observed_replace(source: Path, target: Path) -> None:
        assert source in synced, f"{target} gets its name before its content is durable"
        if target.name == "COMMITTED":
            when_committed.append(set(at_stake))
        replace(source, target)
        at_stake.add(target)

    def observed_mkdir(path: Path, *arguments: int) -> None:
        mkdir(path, *arguments)
        at_stake.add(Path(path))

    monkeypatch.setattr(os, "fsync", observed_fsync)
    monkeypatch.setattr(os, "replace", observed_replace)
    monkeypatch.setattr(os, "mkdir", observed_mkdir)
    checkpointer = Checkpointer(
        tmp_path / "new" / "run" / "checkpoints", Config(), rank=0, world_size=1
    )
    for step in (1, 2, 3):
        checkpointer.save(step, {"model/weight": torch.ones(3)}, {})
    checkpointer.wait()
    assert when_committed == [set()] * 3
    assert not at_stake, "nor does a save end before its own name is durable"
