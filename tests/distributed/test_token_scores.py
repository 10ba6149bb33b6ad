"""With logits in chunks, every strategy takes the steps of a process that has whole logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.worker import STRATEGIES, TASKS, losses
from tests.processes import run_ranks
from trainer.models import token_scores
from trainer.strategies.world import World

RUNS = {
    "bert": ["training.steps=4"],
    "recomputed": ["training.steps=4", "training.activation_checkpointing=true"],
    "spanbert": ["training.steps=4", *TASKS["spanbert"]],
    "gpt2": ["training.steps=4", *TASKS["causal_lm"]],
    "bf16": ["training.steps=4", "training.precision=bf16"],
}
TOLERANCE = {"bf16": 1e-3}
STRATEGY = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "accelerate": "accelerate",
    **{name: STRATEGIES[name] for name in ("zero-1", "zero-3")},
}


def train(file: str, runs: dict[str, list[str]], positions: int | None) -> list[list[float]]:
    """The losses of several runs, one after the other in the same processes."""
    if positions is not None:
        token_scores.CHUNK_BYTES = 4 * 600 * positions
    world = World.start(60)
    world.connect("gloo")
    found = [list(losses(file, overrides, world)) for overrides in runs.values()]
    world.close()
    return found


def settings(strategy: str, output: Path) -> dict[str, list[str]]:
    own = [f"strategy={strategy}", "training.micro_batch_size=2"]
    return {name: [*run, *own, f"output={output / name}"] for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def expected(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses of one process with whole logits."""
    runs = settings("single", tmp_path_factory.mktemp("whole"))
    return list(run_ranks(1, train, experiment_file, runs, None)[0])


@pytest.mark.parametrize("strategy", ["single", *STRATEGY])
def test_losses_are_those_of_whole_logits(
    experiment_file: str, tmp_path: Path, expected: list[list[float]], strategy: str
) -> None:
    processes = 1 if strategy == "single" else 2
    runs = settings(STRATEGY.get(strategy, strategy), tmp_path)
    # A micro-batch has 2 rows of 5 predictions (BERT) or more, so 3 chunks or more.
    found = run_ranks(processes, train, experiment_file, runs, 4)[0]
    for name, own, right in zip(RUNS, found, expected, strict=True):
        np.testing.assert_allclose(own, right, rtol=TOLERANCE.get(name, 1e-5), err_msg=name)
