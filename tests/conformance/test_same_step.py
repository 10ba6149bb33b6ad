"""The same step at any world size, strategy, micro-batch and number of threads.

A covering set of the full matrix.

`make conformance` runs the whole product and writes docs/conformance.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.matrix import BATCHES, RELATIVE, SETTINGS, STEPS, STRATEGIES, compare
from tests.conformance.worker import Case, Record, run_cases, run_once
from tests.processes import run_ranks

# Every pair of values of any two columns that can occur together occurs in at least one row.
CASES = [
    Case(1, "ddp", 1, 3, "concat"),
    Case(1, "fsdp", 4, 0, "best_fit"),
    Case(2, "ddp", 4, 1, "best_fit"),
    Case(2, "fsdp", 8, 3, "concat"),
    Case(2, "hsdp", 1, 0, "concat"),
    Case(3, "ddp", 8, 0, "concat"),
    Case(3, "fsdp", 1, 1, "best_fit"),
    Case(4, "hsdp", 4, 3, "best_fit"),
    Case(4, "ddp", 1, 1, "concat"),
    Case(4, "fsdp", 8, 0, "best_fit"),
    Case(4, "hsdp", 8, 1, "concat"),
    Case(5, "ddp", 1, 0, "best_fit"),
    Case(5, "fsdp", 4, 1, "concat"),
    Case(3, "ddp", 4, 3, "best_fit"),
    Case(5, "fsdp", 8, 3, "best_fit"),
]


@pytest.fixture(scope="module")
def references(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """What the single process does, by packing."""
    cases = [Case(1, "single", 8, 1, packing) for packing in ("concat", "best_fit")]
    (records,) = run_ranks(
        1, run_cases, experiment_file, cases, STEPS, BATCHES, str(tmp_path_factory.mktemp("single"))
    )
    return {case.packing: record for case, record in zip(cases, records, strict=True)}


def test_the_cases_cover_every_pair() -> None:
    def pairs(cases: list[Case]) -> set[tuple[object, ...]]:
        rows = [dataclasses.astuple(case) for case in cases]
        return {
            (a, b, row[a], row[b]) for row in rows for a, b in itertools.combinations(range(5), 2)
        }

    single = [
        Case(1, "single", *setting) for setting in itertools.product(*SETTINGS)
    ]  # needs no others to agree with
    possible = [
        Case(size, strategy, *setting)
        for size, strategies in STRATEGIES.items()
        for strategy in strategies
        for setting in itertools.product(*SETTINGS)
    ]
    assert pairs(CASES + single) == pairs(possible)


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.long),
        2,
        pytest.param(3, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.exhaustive),
        pytest.param(5, marks=pytest.mark.long),
    ],
)
def test_same_batches_and_losses(
    experiment_file: str, tmp_path: Path, references: dict[str, Record], world_size: int
) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    ranks = run_ranks(world_size, run_cases, experiment_file, cases, STEPS, BATCHES, str(tmp_path))
    for i, case in enumerate(cases):
        difference = compare([records[i] for records in ranks], references[case.packing])
        assert difference <= RELATIVE, (
            f"{case}: other batches, or a loss that is off by {difference}"
        )


def test_another_seed_is_another_run(experiment_file: str, tmp_path: Path) -> None:
    """The digests and losses that the matrix compares do depend on what they are about."""
    overrides = ["strategy=single", "training.steps=5"]
    runs = [
        run_ranks(
            1,
            run_once,
            experiment_file,
            [*overrides, f"output={tmp_path / str(seed)}", f"seed={seed}"],
        )
        for seed in (0, 1)
    ]
    assert not np.allclose(runs[0], runs[1], rtol=RELATIVE)


def test_resume_at_another_world_size(experiment_file: str, tmp_path: Path) -> None:
    """Saved at 4 ranks of FSDP2 and continued elsewhere, a run has the losses that it would have
    had.
    """
    overrides = [f"output={tmp_path}", "training.steps=15", "checkpoint.keep_last=9"]
    whole = run_ranks(4, run_once, experiment_file, [*overrides, "checkpoint.every=5"])[0]
    assert len(whole) == 15
    for world_size, strategy in ((3, "fsdp"), (1, "single"), (2, "ddp")):
        resumed = run_ranks(
            world_size, run_once, experiment_file, [*overrides, f"strategy={strategy}"], 5
        )[0]
        np.testing.assert_allclose(
            resumed, whole[5:], rtol=RELATIVE, err_msg=f"{world_size} x {strategy}"
        )
