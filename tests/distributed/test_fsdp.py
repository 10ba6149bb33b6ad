"""FSDP2 computes with the same weights as DDP, and may reduce gradients in each micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.config import load
from tests.conformance.worker import losses, make_trainer
from tests.processes import run_ranks
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

STEPS = ["training.steps=6", "optimizer={kind: adamw, lr: 1e-2}"]  # norms move away from 1 at once


def train(file: str, overrides: list[str]) -> list[float]:
    world = World.start(60)
    world.connect("gloo")
    seen = losses(file, overrides, world)
    world.close()
    return list(seen.values()) if isinstance(seen, dict) else list(seen)


def gradients_after_the_first_micro_batch(file: str, overrides: list[str]) -> list[bool]:
    """Whether each parameter's partition has a gradient then."""
    world = World.start(60)
    world.connect("gloo")
    trainer = make_trainer(load(Experiment, file, overrides), world)
    strategy, found = trainer.strategy, list[Any]()
    backward = strategy.backward

    def watched(loss: torch.Tensor) -> None:
        backward(loss)
        found.append([parameter.grad is not None for parameter in strategy.parameters.values()])

    strategy.backward = watched  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    world.close()
    return list(found[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("{kind: fsdp, replicas: 2}", marks=pytest.mark.long)]
)
def test_bf16_is_that_of_ddp(experiment_file: str, tmp_path: Path, strategy: str) -> None:
    """Norms gathered in bf16 have weights of 8 bits, and losses that are off by 1e-4."""
    settings = [*STEPS, "training.precision=bf16"]
    seen = [
        run_ranks(
            2, train, experiment_file, [*settings, f"output={tmp_path / name}", f"strategy={kind}"]
        )[0]
        for name, kind in (("ddp", "ddp"), ("sharded", strategy))
    ]
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["kind: fsdp", pytest.param("kind: fsdp, replicas: 2", marks=pytest.mark.long)]
)
def test_gradients_may_be_reduced_in_each_micro_batch(
    experiment_file: str, tmp_path: Path, strategy: str
) -> None:
    settings = [*STEPS, "training.micro_batch_size=2"]
    seen = {}
    for each in ("false", "true"):
        changed = f"strategy={{{strategy}, reduce_each_micro_batch: {each}}}"
        overrides = [*settings, f"output={tmp_path / each}", changed]
        seen[each] = run_ranks(2, train, experiment_file, overrides)[0]
    np.testing.assert_allclose(seen["true"], seen["false"], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("each", [False, True])
def test_reduced_gradients_are_partitioned_at_once(
    experiment_file: str, tmp_path: Path, each: bool
) -> None:
    settings = [*STEPS, "training.micro_batch_size=2", f"output={tmp_path}"]
    settings.append(f"strategy={{kind: fsdp, reduce_each_micro_batch: {str(each).lower()}}}")
    for found in run_ranks(2, gradients_after_the_first_micro_batch, experiment_file, settings):
        assert set(found) == {each}


OPTIMIZERS = {
    "adamw": "{kind: adamw, lr: 1e-2}",
    "lamb": "{kind: lamb, lr: 1e-2}",
    "adafactor": "{kind: adafactor, lr: 1e-2, min_dim_size_to_factor: 16}",
}


@pytest.mark.long
def test_replicas_have_the_same_bits_if_their_sums_differ(
    experiment_file: str, tmp_path: Path
) -> None:
    """A replica's all-reduce may add in another order, as NCCL's may on another node."""
    runs = {
        name: [
            *("training.steps=4", "training.max_grad_norm=0.1", "training.verify_state_every=1"),
            *("strategy={kind: fsdp, replicas: 2}", f"optimizer={settings}"),
            f"output={tmp_path / name}",
        ]
        for name, settings in OPTIMIZERS.items()
    }
    assert run_ranks(2, with_other_sums, experiment_file, runs)[0] == dict.fromkeys(runs, 4)


def with_other_sums(file: str, runs: dict[str, list[str]]) -> dict[str, int]:
    """Number of steps of each run in which the replicas are equal."""
    world = World.start(60)
    world.connect("gloo")
    all_reduce = dist.all_reduce

    def rounded_otherwise(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        all_reduce(tensor, op, group)
        if group is not None and group.group_desc == "mesh_shard" and world.rank == 1:
            tensor.mul_(1 + 2.0**-20)  # so much that fp32 shows it in every step

    dist.all_reduce = rounded_otherwise
    steps = {}
    for name, overrides in runs.items():
        steps[name] = len(losses(file, overrides, world))
    world.close()
    return steps
