"""Muon takes the same steps however matrices are partitioned, and goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.matrix import RELATIVE
from tests.conformance.worker import run_once
from tests.processes import run_ranks

SETTINGS = [
    "optimizer={kind: muon, lr: 3e-3}",
    "model.dropout=0.1",
    "training.steps=12",
    "checkpoint.every=4",
    "checkpoint.keep_last=9",
]


@pytest.fixture(scope="module")
def whole(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """The run in three FSDP2 processes; 3 does not divide the rows of its matrices."""
    output = tmp_path_factory.mktemp("whole")
    settings = [f"output={output}", "strategy=fsdp", *SETTINGS]
    return output, run_ranks(3, run_once, experiment_file, settings)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, "single"),
        (2, "ddp"),
        (4, "{kind: fsdp, replicas: 2}"),
        (2, "{kind: deepspeed, stage: 1}"),
        (3, "{kind: deepspeed, stage: 2}"),
        (3, "{kind: deepspeed, stage: 3}"),
    ],
)
def test_every_strategy_takes_the_same_steps(
    experiment_file: str,
    tmp_path: Path,
    whole: tuple[Path, list[float]],
    world_size: int,
    strategy: str,
) -> None:
    settings = [f"output={tmp_path}", f"strategy={strategy}", *SETTINGS]
    losses = run_ranks(world_size, run_once, experiment_file, settings)[0]
    np.testing.assert_allclose(losses, whole[1], rtol=RELATIVE)


@pytest.mark.parametrize(
    ("step", "world_size", "strategy"),
    [
        (4, 1, "single"),
        pytest.param(8, 2, "{kind: deepspeed, stage: 1}", marks=pytest.mark.long),
        (8, 2, "ddp"),
    ],
)
def test_momentum_moves_to_other_strategies(
    experiment_file: str,
    whole: tuple[Path, list[float]],
    step: int,
    world_size: int,
    strategy: str,
) -> None:
    output, losses = whole
    settings = [f"output={output}", f"strategy={strategy}", *SETTINGS, "checkpoint.every=1000"]
    resumed = run_ranks(world_size, run_once, experiment_file, settings, step)[0]
    np.testing.assert_allclose(resumed, losses[step:], rtol=RELATIVE)
