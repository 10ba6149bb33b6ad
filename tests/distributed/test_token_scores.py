"""With logits in chunks, every strategy takes the steps of a process that has whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

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
    "t5": ["training.steps=4"],  # with an output matrix of its own
    "bf16": ["training.steps=4", "training.precision=bf16"],
}
TOLERANCE = {"bf16": 1e-3}
STRATEGY = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "accelerate": "accelerate",
    **{name: STRATEGIES[name] for name in ("zero-1", "zero-3")},
}


Files: TypeAlias = dict[str, str]


def train(files: Files, strategy: str, output: str, positions: int | None) -> list[list[float]]:
    """The losses of several runs, one after the other in the same processes."""
    if positions is not None:
        token_scores.CHUNK_BYTES = 4 * 600 * positions
    world = World.start(60)
    world.connect("gloo")
    found = []
    for name, run in RUNS.items():
        own = [f"strategy={strategy}", "training.micro_batch_size=2", f"output={output}/{name}"]
        found.append(losses(files["t5" if name == "t5" else "bert"], [*run, *own], world))
    world.close()
    return found


@pytest.fixture(scope="module")
def files(experiment_file: str, t5_experiment: str) -> Files:
    return {"bert": experiment_file, "t5": t5_experiment}


@pytest.fixture(scope="module")
def expected(files: Files, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses of one process with whole logits."""
    output = str(tmp_path_factory.mktemp("whole"))
    return list(run_ranks(1, train, files, "single", output, None)[0])


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", *STRATEGY])
def test_losses_are_those_of_whole_logits(
    files: Files, tmp_path: Path, expected: list[list[float]], strategy: str
) -> None:
    processes = 1 if strategy == "single" else 2
    kind = STRATEGY.get(strategy, strategy)
    # A micro-batch has 2 rows of 5 predictions (BERT) or more, so 3 chunks or more.
    found = run_ranks(processes, train, files, kind, str(tmp_path), 4)[0]
    for name, own, right in zip(RUNS, found, expected, strict=True):
        np.testing.assert_allclose(own, right, rtol=TOLERANCE.get(name, 1e-5), err_msg=name)
