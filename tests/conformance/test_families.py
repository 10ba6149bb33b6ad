"""Objectives with several terms, and families of encoders, are the same run at any world size."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.matrix import BATCHES, RELATIVE, STEPS, TIE, compare, near_ties
from tests.conformance.worker import FAMILIES, TEXT_TASKS, Case, Record, run_cases, run_once
from tests.processes import run_ranks

ENCODERS = [task for task in FAMILIES if task not in TEXT_TASKS]
DRAWS = ("electra", "electra_all_tokens", "deberta_v3")
"""A generator draws the tokens that the model reads."""
LAYOUTS = ("mlm_nsp", "spanbert", "xlnet")
"""Pairs, spans, permutations."""
ZERO = ("albert", "electra", "elmo")
"""Shared layers, two models in one, recurrent layers."""


def with_long(tasks: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrizes a test by all encoders: those given are long, the others exhaustive."""
    marks = [pytest.mark.long if each in tasks else pytest.mark.exhaustive for each in ENCODERS]
    cases = [pytest.param(each, marks=mark) for each, mark in zip(ENCODERS, marks, strict=True)]
    return pytest.mark.parametrize("task", cases, indirect=True)


@pytest.fixture(scope="module", params=ENCODERS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(experiment_file: str, task: str, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """What the single process does."""
    output = str(tmp_path_factory.mktemp("single"))
    ((record,),) = run_ranks(
        1,
        run_cases,
        experiment_file,
        [Case(1, "single", 8, 1, FAMILIES[task], task)],
        STEPS,
        BATCHES,
        output,
    )
    return record


@with_long(LAYOUTS)
def test_three_processes_have_its_batches_and_losses(
    experiment_file: str, tmp_path: Path, task: str, reference: Record
) -> None:
    check(Case(3, "ddp", 4, 0, FAMILIES[task], task), experiment_file, tmp_path, reference)


@with_long(ZERO)
def test_zero_has_its_batches_and_losses(
    experiment_file: str, tmp_path: Path, task: str, reference: Record
) -> None:
    check(Case(3, "zero-3", 4, 0, FAMILIES[task], task), experiment_file, tmp_path, reference)


def check(case: Case, experiment_file: str, tmp_path: Path, reference: Record) -> None:
    ranks = run_ranks(3, run_cases, experiment_file, [case], STEPS, BATCHES, str(tmp_path))
    assert compare([records[0] for records in ranks], reference) <= RELATIVE


@pytest.mark.long
def test_two_processes_have_its_losses_and_one_goes_on_from_them(
    experiment_file: str, tmp_path: Path, task: str, reference: Record
) -> None:
    settings = Case(2, "fsdp", 4, 1, FAMILIES[task], task).overrides
    overrides = [*settings, f"output={tmp_path}", f"training.steps={STEPS}"]
    whole = run_ranks(2, run_once, experiment_file, [*overrides, "checkpoint.every=20"])[0]
    np.testing.assert_allclose(whole, reference.losses, rtol=RELATIVE)
    (resumed,) = run_ranks(1, run_once, experiment_file, [*overrides, "strategy=single"], 20)
    np.testing.assert_allclose(resumed, reference.losses[20:], rtol=RELATIVE)


@pytest.mark.parametrize(
    ("task", "draws"),
    [
        pytest.param(task, task in DRAWS, marks=[] if task == "electra" else pytest.mark.long)
        for task in ENCODERS
    ],
    indirect=["task"],
)
def test_samples_may_differ_between_near_ties_only(draws: bool, reference: Record) -> None:
    assert bool(reference.samples) == draws
    if not draws:
        return
    assert near_ties([reference], reference) == 0
    place, (token, gap) = max(reference.samples.items(), key=lambda item: item[1][1])
    for closeness, expected in ((gap, None), (TIE / 2, 1)):
        other = replace(reference, samples={**reference.samples, place: (token + 1, closeness)})
        assert near_ties([other], reference) == expected
    assert near_ties([replace(reference, samples={})], reference) is None
