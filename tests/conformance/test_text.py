"""T5's span corruption, UL2's denoising and GPT-2's language modeling are the same run at any world
size, too, with Adafactor; and so is BART, with AdamW.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.matrix import RELATIVE, compare
from tests.conformance.worker import Case, Record, run_cases, run_once
from tests.processes import run_ranks

STEPS, BATCHES = 8, 110  # a few more than an epoch
CASES = [
    Case(2, "fsdp", 1, 0, "best_fit", "span_corruption"),
    Case(2, "ddp", 8, 1, "best_fit", "causal_lm"),
    Case(3, "ddp", 4, 0, "concat", "span_corruption"),
    Case(3, "fsdp", 4, 1, "concat", "causal_lm"),
    Case(2, "fsdp", 4, 1, "best_fit", "bart"),
    Case(3, "ddp", 1, 0, "best_fit", "bart"),
    Case(5, "fsdp", 8, 0, "concat", "span_corruption"),
    Case(2, "ddp", 1, 0, "best_fit", "ul2"),
]


@pytest.fixture(scope="module")
def references(
    t5_experiment: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Record]:
    """What the single process does, by packing and task."""
    cases = [
        Case(1, "single", 8, 1, *key)
        for key in sorted({(case.packing, case.task) for case in CASES})
    ]
    (records,) = run_ranks(
        1, run_cases, t5_experiment, cases, STEPS, BATCHES, str(tmp_path_factory.mktemp("single"))
    )
    return {(case.packing, case.task): record for case, record in zip(cases, records, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_same_batches_and_losses(
    t5_experiment: str, tmp_path: Path, references: dict[tuple[str, str], Record], world_size: int
) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    ranks = run_ranks(world_size, run_cases, t5_experiment, cases, STEPS, BATCHES, str(tmp_path))
    for i, case in enumerate(cases):
        difference = compare([records[i] for records in ranks], references[case.packing, case.task])
        assert difference <= RELATIVE, (
            f"{case}: other batches, or a loss that is off by {difference}"
        )


@pytest.mark.long
def test_adafactor_moves_from_four_ranks_to_three_and_to_one(
    t5_experiment: str, tmp_path: Path
) -> None:
    overrides = [
        f"output={tmp_path}",
        "training.steps=12",
        "checkpoint.every=4",
        "checkpoint.keep_last=9",
    ]
    whole = run_ranks(4, run_once, t5_experiment, overrides)[0]
    resumed = run_ranks(3, run_once, t5_experiment, [*overrides, "training.steps=8"], 4)[0]
    np.testing.assert_allclose(resumed, whole[4:8], rtol=RELATIVE)
    (resumed,) = run_ranks(
        1, run_once, t5_experiment, [*overrides, "strategy=single"], 8
    )  # what the three have saved
    np.testing.assert_allclose(resumed, whole[8:], rtol=RELATIVE)
