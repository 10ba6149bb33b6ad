"""fp16: a run is that of fp32, ranks skip the same steps, and the loss scale lives on at another
world size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from samestep.config import load
from tests.conformance.worker import make_trainer, run_once
from tests.processes import run_ranks
from trainer.monitoring import Tracker
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.recorder import Destinations

ADAM, LAMB = "optimizer={kind: adamw, lr: 1e-3}", "optimizer={kind: lamb, lr: 1e-2}"


class Rows(Tracker):
    """A tracker that keeps what fp16 is about."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = ("train/loss", "train/grad_norm", "train/loss_scale", "train/skipped_steps")
        self.values.append({name: metrics[name] for name in names if name in metrics})

    def close(self) -> None: ...


def train(
    file: str,
    overrides: list[str],
    overflow: tuple[int, ...] = (),
    resume: int | None = None,
    factor: float = 2.0**12,
) -> list[Any]:
    """What one rank finds: the metrics of each step, and the loss scale in the end.

    Args:
        file: the experiment.
        overrides: of it.
        overflow: the steps in which the last rank, and no other, has gradients that are not finite.
        resume: the step to go on from.
        factor: the loss scale at the start.
    """
    world = World.start(60)
    world.connect("gloo")
    trainer = make_trainer(load(Experiment, file, overrides), world)
    scale, backward = trainer.strategy.loss_scale, trainer.strategy.backward
    assert scale is not None
    scale.factor.fill_(factor)

    def injected(loss: Tensor) -> None:
        backward(
            loss * math.inf
            if trainer.state.step in overflow and world.rank == world.size - 1
            else loss
        )

    trainer.strategy.backward = injected  # type: ignore[method-assign]
    if resume is not None:
        trainer.restore(resume)
    tracker = Rows()
    trainer.fit(Destinations([tracker]))
    trainer.close()
    world.close()
    return [tracker.values, scale.state_dict()]


def losses(rows: list[dict[str, float]]) -> list[float]:
    return [row["train/loss"] for row in rows]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer"),
    [(2, "ddp", LAMB), pytest.param(3, "fsdp", ADAM, marks=pytest.mark.long)],
)
def test_skipped_alike_and_resumed_elsewhere(
    experiment_file: str, tmp_path: Path, world_size: int, strategy: str, optimizer: str
) -> None:
    overrides = [
        optimizer,
        "training.precision=fp16",
        f"output={tmp_path}",
        "checkpoint.every=8",
        "data.threads=0",
    ]
    ranks = run_ranks(
        world_size, train, experiment_file, [*overrides, f"strategy={strategy}"], (5, 7)
    )
    assert all(rank == ranks[0] for rank in ranks)
    rows, scale = ranks[0]
    assert scale == {"factor": 2.0**10, "since": 4, "skipped": 2}
    assert [row["train/loss_scale"] for row in rows] == [2.0**12] * 5 + [2.0**11] * 2 + [
        2.0**10
    ] * 5
    assert [row["train/skipped_steps"] for row in rows] == [0] * 5 + [1] * 2 + [2] * 5
    assert [step for step, row in enumerate(rows) if "train/grad_norm" not in row] == [5, 7]
    ((resumed, resumed_scale),) = run_ranks(
        1, train, experiment_file, [*overrides, "strategy=single"], (), 8
    )
    assert resumed_scale == scale
    np.testing.assert_allclose(losses(resumed), losses(rows)[8:], rtol=1e-3)


@pytest.mark.long
def test_the_loss_scale_at_which_gradients_overflow_does_not_grow_with_replicas(
    experiment_file: str, tmp_path: Path
) -> None:
    found = {}
    for world_size in (1, 2, 3):
        overrides = ["training.precision=fp16", f"output={tmp_path}/{world_size}", "strategy=ddp"]
        ranks = run_ranks(world_size, train, experiment_file, overrides, (), None, 2.0**26)
        found[world_size] = ranks[0][1]
    assert 2 < found[1]["skipped"] < 12
    assert found[2] == found[3] == found[1]


@pytest.mark.long
def test_it_follows_fp32(experiment_file: str, tmp_path: Path) -> None:
    common = [LAMB, "data.threads=0"]
    ranks = run_ranks(
        2, train, experiment_file, [*common, "training.precision=fp16", f"output={tmp_path}/fp16"]
    )
    (fp32,) = run_ranks(1, run_once, experiment_file, [*common, f"output={tmp_path}/fp32"])
    rows, scale = ranks[0]
    assert scale["skipped"] == 0
    np.testing.assert_allclose(losses(rows), fp32, rtol=1e-3)
    assert losses(rows) != fp32
