"""Scores between passes see the current weights, under every strategy.

A loop of your own may score at any time: between gradients and step, after a step, after a restore.
A pass without a backward pass must not leave old weights behind for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.conformance.matrix import RELATIVE
from tests.conformance.worker import STRATEGIES
from tests.processes import run_ranks
from tests.unit.strategies.test_world import timeouts
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.strategies import Strategy
from trainer.strategies.world import World
from trainer.training import own_loop
from trainer.training.evaluation import score_each
from trainer.training.experiment import Experiment
from trainer.training.passes import accumulate_gradients
from trainer.training.starting import load_experiment

STRATEGIES = STRATEGIES | {
    "keeps": "{kind: fsdp, reshard_after_forward: false}",
    "keeps-hsdp": "{kind: fsdp, replicas: 2, reshard_after_forward: false}",
}


def scored(file: str, folder: str, strategies: list[str]) -> list[list[float]]:
    """What the loops of several strategies see, one after the other in the same processes."""
    world = World.start(60)
    world.connect("gloo")

    @contextmanager
    def connected(experiment: Experiment) -> Iterator[Strategy]:
        yield experiment.strategy.build(CpuAccelerator(), world, experiment.training.precision)

    own_loop.open_strategy = connected
    found = []
    for strategy in strategies:
        output = f"output={folder}/{world.size}-{strategy}"
        settings = [output, f"strategy={STRATEGIES.get(strategy, strategy)}", "data.threads=0"]
        found.append(_loop(load_experiment(file, settings)))
        assert {seconds for seconds, _ in timeouts()} == {60.0}, timeouts()
    world.close()
    return found


def _sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=2.0)


def _loop(experiment: Experiment) -> list[float]:
    with own_loop.open_parts(experiment, _sgd) as parts:
        model, strategy, batches = parts.model, parts.strategy, parts.batches
        seen, held = [], next(batches)

        def score() -> None:
            model.eval()
            totals = torch.tensor(score_each(model, batches.objective, strategy, held)).sum(0)
            model.train()
            total, weight = strategy.all_reduce(totals.double()).tolist()
            seen.append(total / weight)

        score()
        for micro_batches in (held, next(batches), next(batches)):
            accumulate_gradients(model, batches.objective, strategy, micro_batches)
            score()  # the old weights, for the last time
            strategy.step(parts.optimizer, strategy.clip_grad_norm(1.0))
            parts.optimizer.zero_grad()
            score()
            if len(seen) == 3:
                parts.checkpoints.save()
        parts.checkpoints.restore()
        score()
    return seen


@pytest.fixture(scope="module")
def reference(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = str(tmp_path_factory.mktemp("single"))
    ((seen,),) = run_ranks(1, scored, experiment_file, folder, ["single"])
    first, gradients, second, *_, last, restored = seen
    assert first == gradients
    assert restored == second  # of the checkpoint
    assert abs(last - second) > 0.01
    return list(seen)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [
        (1, ["ddp", "fsdp", "keeps"]),
        pytest.param(
            2,
            ["ddp", "fsdp", "keeps", "hsdp", "keeps-hsdp", "accelerate"],
            marks=pytest.mark.long,
        ),
        pytest.param(2, ["zero-1", "zero-2", "zero-3"], marks=pytest.mark.long),
    ],
)
def test_scores_between_passes_are_those_of_one_process(
    experiment_file: str,
    tmp_path: Path,
    reference: list[float],
    world_size: int,
    strategies: list[str],
) -> None:
    found = run_ranks(world_size, scored, experiment_file, str(tmp_path), strategies)[0]
    for strategy, seen in zip(strategies, found, strict=True):
        np.testing.assert_allclose(seen, reference, rtol=RELATIVE, err_msg=strategy)


def test_an_interrupted_pass_leaves_no_old_weights(experiment_file: str, tmp_path: Path) -> None:
    """As Ctrl-C in a notebook's cell that scores."""
    ((old, new, restored),) = run_ranks(1, interrupted, experiment_file, str(tmp_path))
    assert restored == old != new


def interrupted(file: str, folder: str) -> list[float]:
    strategy = STRATEGIES["keeps"]
    settings = [f"output={folder}/run", f"strategy={strategy}", "data.threads=0"]
    with own_loop.open_parts(load_experiment(file, settings), _sgd) as parts:
        model, strategy, objective = parts.model, parts.strategy, parts.batches.objective
        micro_batches = next(parts.batches)

        def score() -> float:
            model.eval()
            found = score_each(model, objective, strategy, micro_batches)
            model.train()
            return sum(total for total, _ in found)

        parts.checkpoints.save()
        seen = [score()]
        accumulate_gradients(model, objective, strategy, micro_batches)
        strategy.step(parts.optimizer, strategy.clip_grad_norm(1.0))
        seen.append(score())

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        hook = list(model.modules())[-1].register_forward_hook(interrupt)
        with suppress(KeyboardInterrupt):
            score()
        hook.remove()
        parts.checkpoints.restore()
        seen.append(score())
    return seen
