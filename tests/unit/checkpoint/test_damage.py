"""Whatever happens to the bytes of a checkpoint, it is noticed, and the one before is taken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError
from tests.damage import damaged
from trainer.checkpoint import Checkpointer, Config, integrity


def open_at(folder: Path) -> Checkpointer:
    return Checkpointer(folder, Config(), rank=0, world_size=1)


@pytest.mark.parametrize("rounds", [60, pytest.param(250, marks=pytest.mark.chaos)])
def test_damage_is_never_loaded(tmp_path: Path, rounds: int) -> None:
    checkpointer = open_at(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"model/weight": torch.full((50, 7), float(step))}, {"order": step})
    checkpointer.wait()
    newest = integrity.step_folder(tmp_path, 2)
    chance = random.Random(0)
    for _ in range(rounds):
        with damaged(sorted(newest.iterdir()), chance) as damage:
            found = {"model/weight": torch.zeros(50, 7)}
            assert open_at(tmp_path).restore(found)["order"] == 1, damage
            assert (found["model/weight"] == 1).all()
            with pytest.raises(CheckpointError):
                open_at(tmp_path).open(newest)
        assert open_at(tmp_path).latest() == 2
