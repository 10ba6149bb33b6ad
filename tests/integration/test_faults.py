"""Numerical faults: the run goes on as if the examples had been excluded from the start, whatever
the world size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.config import load
from tests.conformance.worker import make_trainer
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks
from trainer.strategies.world import World
from trainer.training import run
from trainer.training.experiment import Experiment

# A global batch has 10 examples: step 8 takes 70 to 79, of which one rank has number 75.
SICK = "objective={kind: tests.sick_objective, sick: [75]}"


def overrides(folder: Path, *more: str) -> list[str]:
    return [f"output={folder}", "checkpoint.every=3", "data.threads=0", SICK, *more]


def train(file: str, settings: list[str], world_size: int = 1) -> None:
    """Runs an experiment in so many processes; a single one is this."""
    if world_size > 1:
        run_ranks(world_size, train, file, settings)
    else:
        run.train(load(Experiment, file, settings))


def excluded(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "excluded"]


def assert_same_losses(folder: Path, other: Path) -> None:
    found, wanted = losses(folder), losses(other)
    assert list(found) == list(wanted) == list(range(1, 13))
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)


@pytest.fixture(scope="module")
def without(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The folder of a run that excludes examples from the start."""
    folders: dict[str, Path] = {}

    def make(ranges: str) -> Path:
        if ranges not in folders:
            folders[ranges] = tmp_path_factory.mktemp("without") / "run"
            settings = overrides(folders[ranges], f"data.exclude={ranges}", "strategy=single")
            train(experiment_file, settings)
        return folders[ranges]

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "single"), (2, "ddp"), pytest.param(3, "fsdp", marks=pytest.mark.long)],
)
def test_skip(
    experiment_file: str, tmp_path: Path, without: Any, world_size: int, strategy: str
) -> None:
    settings = overrides(tmp_path, f"strategy={strategy}", "training.faults.action=skip")
    train(experiment_file, settings, world_size)
    assert_same_losses(tmp_path, without("[[70, 80]]"))
    (row,) = excluded(tmp_path)
    assert (row["step"], row["examples"], row["reason"]) == (
        8,
        [[70, 80]],
        "the gradient norm is nan",
    )


def test_skipped_spike(experiment_file: str, tmp_path: Path, without: Any) -> None:
    faults = "training.faults={action: skip, sigma: 50, window: 5}"
    spike = "objective={kind: tests.sick_objective, sick: [75], factor: 100}"
    train(experiment_file, overrides(tmp_path, "strategy=single", faults, spike))
    assert_same_losses(tmp_path, without("[[70, 80]]"))
    assert excluded(tmp_path)[0]["reason"].startswith("the gradient norm is ")


@pytest.mark.long
def test_rewind(experiment_file: str, tmp_path: Path, without: Any) -> None:
    """From step 8 to step 6, the newest from before step 7.

    And so it stays when the run is resumed elsewhere.
    """
    settings = overrides(tmp_path, "training.faults={action: rewind, around: 1}")
    train(experiment_file, [*settings, "strategy=fsdp"], world_size=2)
    assert_same_losses(tmp_path, without("[[60, 90]]"))
    (row,) = excluded(tmp_path)
    assert (row["step"], row["examples"]) == (7, [[60, 90]])
    assert row["reason"] == "the gradient norm is nan at step 8, gone back to step 6"
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000012")
    train(experiment_file, [*settings, "strategy=single"])
    assert_same_losses(tmp_path, without("[[60, 90]]"))


@pytest.mark.long
def test_second_rewind_to_the_same_checkpoint(
    experiment_file: str, tmp_path: Path, without: Any
) -> None:
    """What the first one passed over, which no checkpoint knows of yet, stays so."""
    sick = "objective={kind: tests.sick_objective, sick: [75, 85]}"
    train(
        experiment_file,
        overrides(tmp_path, "strategy=single", "training.faults={action: rewind, around: 0}", sick),
    )
    assert_same_losses(tmp_path, without("[[70, 90]]"))
    assert [row["examples"] for row in excluded(tmp_path)] == [[[80, 90], [70, 80]]]


@pytest.mark.long
def test_rewind_gives_up_the_checkpoints_between(
    samestep: Samestep, experiment_file: str, tmp_path: Path, without: Any
) -> None:
    settings = overrides(tmp_path, "strategy=single", "training.faults={action: rewind, around: 3}")
    result = samestep("train", experiment_file, *settings)
    assert result.code == 0, result.err
    assert "from step 4 on, the examples 40 to 109 are skipped" in result.err
    assert_same_losses(tmp_path, without("[[40, 110]]"))
    verdict = samestep("ledger", "verify", tmp_path)
    assert verdict.code == 0, verdict.out
    assert "109" in verdict.out


def test_rewind_without_a_checkpoint_skips(
    samestep: Samestep, experiment_file: str, tmp_path: Path, without: Any
) -> None:
    settings = overrides(tmp_path, "strategy=single", "training.faults={action: rewind, around: 5}")
    result = samestep("train", experiment_file, *settings)
    assert result.code == 0, result.err
    assert "only the step is skipped" in result.err
    assert_same_losses(tmp_path, without("[[70, 80]]"))


def test_passing_fault(
    samestep: Samestep, experiment_file: str, tmp_path: Path, finished_run: Path
) -> None:
    passing = "objective={kind: tests.sick_objective, sick: [75], passing: true}"
    settings = overrides(tmp_path, "strategy=single", "training.faults.action=skip", passing)
    result = samestep("train", experiment_file, *settings)
    assert result.code == 0, result.err
    assert "step 8: the gradient norm is nan; recomputing it from the same batch" in result.err
    assert "a transient fault" in result.err
    assert not excluded(tmp_path)
    assert losses(tmp_path) == losses(finished_run)


def test_stop(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """With sigma each step is looked at; without, rows of metrics are."""
    for name, more, message in (
        (
            "looks",
            "training.faults={sigma: 6}",
            "step 8 was not taken: the gradient norm is nan, also when recomputed",
        ),
        ("does-not", "training.log_every=5", "train/loss is nan at step 9"),
    ):
        result = samestep(
            "train", experiment_file, *overrides(tmp_path / name, "strategy=single", more)
        )
        assert result.code == 1
        assert message in result.message
        assert f"samestep replay {tmp_path / name} " in result.message


def test_too_many(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    sick = f"objective={{kind: tests.sick_objective, sick: {list(range(70, 200))}}}"
    settings = overrides(
        tmp_path, "strategy=single", "training.faults={action: skip, most_in_a_row: 2}", sick
    )
    result = samestep("train", experiment_file, *settings)
    assert result.code == 1
    assert "3 faults in a row, the last at step 8" in result.message


@pytest.mark.parametrize(("batch", "kept"), [(10, 8), (20, 0)])
def test_losses_of_another_batch_size_are_no_measure_of_a_fault(
    experiment_file: str, tmp_path: Path, batch: int, kept: int
) -> None:
    settings = [f"output={tmp_path}", "training.faults={sigma: 6, window: 8}", "data.threads=0"]
    train(experiment_file, [*settings, "checkpoint.every=8"])
    world = World.start(60)
    world.connect("gloo")
    settings.append(f"training.global_batch_size={batch}")
    trainer = make_trainer(load(Experiment, experiment_file, settings), world)
    trainer.restore(8)
    sound = trainer.faults.state_dict()["sound"]
    trainer.close()
    world.close()
    assert [len(window) for window in sound.values()] == [kept, kept]
