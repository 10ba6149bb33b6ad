"""`samestep replay`: a step made again has the run's batch, and with exact weights its loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import Samestep, losses
from tests.mixtures import sources


def replayed(samestep: Samestep, *arguments: object) -> dict[str, Any]:
    result = samestep("replay", *arguments, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def numbers(found: dict[str, Any]) -> list[int]:
    return sorted(example["number"] for example in found["examples"])


def test_exact(samestep: Samestep, finished_run: Path) -> None:
    """The checkpoint is that of step 8; dropout is that of the run.

    Two processes or one make no difference.
    """
    found = replayed(samestep, finished_run, 11, "--exact")
    assert (found["step"], found["weights_of"], found["compared"]) == (11, 10, [11, 11])
    assert found["loss"] == pytest.approx(losses(finished_run)[11], rel=1e-5)
    assert numbers(found) == list(range(100, 110))
    assert [example["loss"] for example in found["examples"]] == sorted(
        (example["loss"] for example in found["examples"]), reverse=True
    )


def test_weights_of_the_checkpoint(samestep: Samestep, finished_run: Path) -> None:
    """Right after a checkpoint they are exact.

    Before the first, they are those that the run started from.
    """
    for step, weights_of in ((9, 8), (11, 8), (1, 0)):
        found = replayed(samestep, finished_run, step)
        assert found["weights_of"] == weights_of
        assert numbers(found) == list(range(10 * step - 10, 10 * step))
        same = found["loss"] == pytest.approx(losses(finished_run)[step], rel=1e-5)
        assert same == (step == weights_of + 1)


def test_documents_are_those_of_the_ledger(samestep: Samestep, finished_run: Path) -> None:
    found = replayed(samestep, finished_run, 9)
    listed = json.loads(samestep("ledger", "step", finished_run, 9, "--json").out)["examples"]
    by_number = {example["number"]: example["documents"] for example in found["examples"]}
    assert by_number == {example["number"]: example["documents"] for example in listed}


def test_table(samestep: Samestep, finished_run: Path) -> None:
    result = samestep("replay", finished_run, 12, "--top", 3)
    assert result.code == 0, result.err
    assert "step 12: 10 examples, loss " in result.out
    assert "the digest of steps 12 to 12 matches the ledger" in result.out
    assert "topics:" in result.out
    assert len(result.out.strip().splitlines()) == 2 + 1 + 3


@pytest.mark.long
def test_phases_and_long_rows(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """Step 11 is the third of a data order that began after the checkpoint, in a row of three
    steps.
    """
    phases = "phases=[{steps: 8}, {steps: 4, sequence_length: 16, global_batch_size: 7}]"
    settings = [
        f"output={tmp_path}",
        "strategy=single",
        "checkpoint={every: 5, keep_last: 3}",
        "training.log_every=3",
    ]
    assert samestep("train", experiment_file, *settings, phases).code == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000010")
    for exact in ([], ["--exact"]):
        found = replayed(samestep, tmp_path, 11, *exact)
        assert found["compared"] == [10, 12]
        assert numbers(found) == list(range(14, 21))
        assert found["weights_of"] == (10 if exact else 5)


@pytest.mark.long
def test_another_batch_size_since_a_resume(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    """The ledger has the batch sizes and mixtures of steps without a checkpoint after them."""
    settings = [
        f"output={tmp_path}",
        "strategy=single",
        "data.path=null",
        sources(parts, a=1, b=0),
        "data.weights=[{step: 7, weights: {a: 0, b: 1}}]",
        "checkpoint={every: 4, keep_last: 9}",
        "schedule={decay: constant, warmup_steps: 1}",
    ]
    for steps, size in ((6, 10), (8, 7), (10, 4)):
        changes = f"training.steps={steps}", f"training.global_batch_size={size}"
        assert samestep("train", experiment_file, *settings, *changes).code == 0
    for step in ("06", "08"):  # so 4 and 10 are left
        shutil.rmtree(tmp_path / "checkpoints" / f"step-000000{step}")
    for step, first, size in ((5, 40, 10), (6, 50, 10), (7, 60, 7), (8, 67, 7), (9, 74, 4)):
        found = replayed(samestep, tmp_path, step)
        assert found["compared"] == [step, step]
        assert numbers(found) == list(range(first, first + size))
    former = "training.global_batch_size=10"
    exact = replayed(samestep, tmp_path, 6, "--exact", former)
    assert exact["loss"] == pytest.approx(losses(tmp_path)[6], rel=1e-5)
    refused = samestep("replay", tmp_path, 9, "--exact", former)
    assert refused.code == 2
    assert "step 7 with 7 examples, not 10. Leave --exact out" in refused.message


@pytest.mark.long
def test_phases_of_one_order(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    """Same order and batch size, another objective; and a mixture that changes on the way."""
    settings = [
        f"output={tmp_path}",
        "strategy=single",
        "data.path=null",
        sources(parts, a=1, b=1),
        "data.weights=[{step: 5, weights: {a: 1, b: 3}}]",
        "phases=[{steps: 6}, {steps: 6, objective: {kind: mlm, mask_fraction: 0.5}}]",
        "checkpoint={every: 4, keep_last: 9}",
    ]
    assert samestep("train", experiment_file, *settings).code == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    for step in (6, 8, 9):
        found = replayed(samestep, tmp_path, step, "--exact")
        assert found["loss"] == pytest.approx(losses(tmp_path)[step], rel=1e-5)


@pytest.mark.long
def test_a_bitwise_run(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    settings = [
        f"output={tmp_path}",
        "strategy=single",
        "checkpoint.every=8",
        "training.exact=bitwise",
        "training.micro_batch_size=4",
        "accelerator={kind: cpu, threads: 1}",
    ]
    assert samestep("train", experiment_file, *settings).code == 0
    found = replayed(samestep, tmp_path, 11, "--exact")
    assert found["loss"] == pytest.approx(losses(tmp_path)[11], rel=1e-5)
    assert numbers(found) == list(range(100, 110))


@pytest.mark.long
def test_after_a_skip(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """The batch that step 8 was taken with, that which was skipped, and a later one, whose numbers
    are shifted.
    """
    settings = [
        "strategy=single",
        "data.threads=0",
        "checkpoint.every=5",
        "training.faults.action=skip",
    ]
    sick = "objective={kind: tests.sick_objective, sick: [75]}"
    assert samestep("train", experiment_file, f"output={tmp_path}", *settings, sick).code == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000010")
    assert numbers(replayed(samestep, tmp_path, 8)) == list(range(80, 90))
    assert numbers(replayed(samestep, tmp_path, 8, "--skipped")) == list(range(70, 80))
    found = replayed(samestep, tmp_path, 10, "--exact")
    assert numbers(found) == list(range(100, 110))
    assert found["loss"] == pytest.approx(losses(tmp_path)[10], rel=1e-5)
    assert "skipped no examples" in samestep("replay", tmp_path, 7, "--skipped").message


def test_another_dataset_is_told(samestep: Samestep, finished_run: Path, tmp_path: Path) -> None:
    """Settings that give other batches than those of the ledger are refused, not scored."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    result = samestep("replay", run, 9, "objective.mask_fraction=0.3")
    assert result.code == 1
    assert "the recomputed batches of steps 9 to 9 have the digest" in result.message


def test_steps_that_are_none(samestep: Samestep, finished_run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((finished_run, 13), "the run has 12 steps"),
        ((finished_run, 0), "STEP is 0. Use 1 or more"),
        ((tmp_path, 3), "is not a run"),
    ):
        result = samestep("replay", *arguments)
        assert result.code == 2
        assert message in result.message
