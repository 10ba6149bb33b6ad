"""`training.best`: early stopping, the checkpoint that stays, and what names it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.cli import main
from samestep.errors import CheckpointError
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.processes import run_ranks
from trainer.checkpoint import integrity, writer
from trainer.checkpoint.files import Location
from trainer.checkpoint.meta import best_step
from trainer.strategies.world import World
from trainer.training.weights import places
from trainer.training.weights.loading import load_weights

SETTINGS = [
    "training.evaluate_every=5",
    "training.steps=150",
    "training.best={metric: accuracy, patience: 4}",
    "optimizer.lr=0.006",
    "checkpoint.every=5",
]


@pytest.fixture(scope="module")
def task(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The experiment of a classifier that soon has learnt what it can."""
    folder = tmp_path_factory.mktemp("best")
    assert (
        main(
            [
                "data",
                "build",
                str(tasks.write_build("classification", folder, dataset_folder / "tokenizer")),
            ]
        )
        == 0
    )
    return tasks.write_experiment("classification", folder, finished_run)


@pytest.fixture(scope="module")
def stopped(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has stopped early."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    assert main(["train", str(task), f"output={run}", *SETTINGS]) == 0
    return run


def evaluations(run: Path) -> dict[int, float]:
    return {
        int(row["step"]): row["heldout/accuracy"]
        for row in tasks.rows_of(run)
        if "heldout/accuracy" in row
    }


def steps(run: Path) -> list[int]:
    return integrity.committed_steps(run / "checkpoints")


def test_a_run_ends_after_its_patience_and_keeps_its_best_checkpoint(
    stopped: Path, tmp_path: Path, samestep: Samestep
) -> None:
    found = evaluations(stopped)
    best, last = max(found, key=lambda step: (found[step], -step)), max(found)
    assert last == best + 4 * 5 < 150
    assert best in steps(stopped)
    assert best_step(stopped / "checkpoints") == best
    assert max(row["step"] for row in tasks.rows_of(stopped) if "train/loss" in row) == last
    again = samestep("train", stopped / "config.yaml")
    assert again.code == 0
    assert "nothing to do" in again.err
    assert "patience" in again.err
    assert f"step         {best}" in samestep("evaluate", stopped, "--step", "best").out
    assert f"step         {last}" in samestep("evaluate", stopped).out
    listed = samestep("checkpoint", "ls", stopped).out.splitlines()
    assert [line.split()[1] for line in listed if "best" in line] == [str(best)]
    assert samestep("checkpoint", "gc", stopped).code == 0
    assert best in steps(stopped)
    assert samestep("export", f"{stopped}/best", tmp_path / "exported").code == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"after step {best}:" in card
    assert samestep("ledger", "verify", stopped).code == 0


@pytest.fixture
def cut(stopped: Path, tmp_path: Path) -> Path:
    """The same run, cut before its last checkpoint."""
    shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{max(steps(stopped)):08d}")
    return tmp_path / "run"


@pytest.mark.long
def test_a_run_that_is_cut_stops_where_it_would_have(
    stopped: Path, cut: Path, samestep: Samestep
) -> None:
    """On two processes: a checkpoint remembers the evaluations before it."""
    assert (
        samestep(
            "train", cut / "config.yaml", f"output={cut}", "--processes", 2, "strategy=ddp"
        ).code
        == 0
    )
    whole, again = evaluations(stopped), evaluations(cut)
    assert list(again) == list(whole)
    np.testing.assert_allclose(list(again.values()), list(whole.values()), atol=0.05)
    assert steps(cut) == steps(stopped)


@pytest.mark.long
def test_more_patience_trains_on(stopped: Path, tmp_path: Path, samestep: Samestep) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    settings = [f"output={run}", "training.best.patience=null"]
    assert samestep("train", run / "config.yaml", *settings).code == 0
    assert max(evaluations(run)) == 150
    best = best_step(run / "checkpoints")
    assert best in steps(run)
    assert evaluations(run)[best] == max(evaluations(run).values())


def test_less_patience_does_not_end_a_run_that_was_cut(cut: Path, samestep: Samestep) -> None:
    settings = [f"output={cut}", "training.best.patience=1"]
    result = samestep("train", cut / "config.yaml", *settings)
    assert result.code == 2
    changed = "of 150, and with other settings (training.best.patience: 4 -> 1) nothing is left"
    assert f"is at step {max(steps(cut))} {changed}" in result.message


@pytest.mark.long
def test_a_best_that_could_not_be_saved_leaves_the_one_before(
    stopped: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluations(stopped)
    best = max(found, key=lambda step: (found[step], -step))
    write_step = writer.write_step

    def full_once(folder: Path, *args: Any, **settings: Any) -> None:
        if folder.name == f"step-{best:08d}":
            raise CheckpointError("no space left on the disk")
        write_step(folder, *args, **settings)

    monkeypatch.setattr(writer, "write_step", full_once)
    run = tmp_path / "run"
    assert main(["train", str(task), f"output={run}", *SETTINGS]) == 0
    second = best_step(run / "checkpoints")
    assert second != best
    assert second in steps(run)
    assert found[second] >= max(score for step, score in found.items() if step < best)


@pytest.mark.long
@pytest.mark.parametrize("name", ["best", "checkpoints/best"])
def test_all_ranks_take_the_same_best_of_a_run_that_is_still_training(
    name: str, samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    """A better checkpoint is saved after rank 0 has looked, and before rank 1 does."""
    run, later = tmp_path / "run", tmp_path / "later"
    settings = ["training.best={metric: loss}", "training.evaluate_every=4", "checkpoint.every=4"]
    assert samestep("train", experiment_file, f"output={run}", *settings).code == 0
    assert best_step(run / "checkpoints") == 12
    shutil.move(run / "checkpoints" / "step-00000012", later)
    assert run_ranks(2, open_best, str(run), name, str(later)) == [8, 8]
    assert steps(run) == [8, 12]


def open_best(run: str, name: str, later: str) -> int | None:
    """The step that one rank opens."""
    world = World.start(60)
    world.connect("gloo")
    find = places.best_step

    def find_in_turn(root: Location) -> int | None:
        if world.rank == 0:
            found = find(root)
            Path(later).rename(f"{run}/checkpoints/step-00000012")
            return found
        while Path(later).exists():
            time.sleep(0.01)
        return find(root)

    places.best_step = find_in_turn
    weights = load_weights(f"{run}/{name}", world.rank, world.size)
    world.close()
    return weights.step


def test_without_a_best_nothing_is_named_so(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    assert (
        "without training.best"
        in samestep("export", f"{finished_run}/best", tmp_path / "exported").message
    )
    assert "without training.best" in samestep("evaluate", finished_run, "--step", "best").message
    assert (
        "--step is last. Use the number of a step"
        in samestep("evaluate", finished_run, "--step", "last").message
    )
    absent = finished_run / "checkpoints" / "step-00000007"
    for command in (
        ("evaluate", finished_run, "--step", "7"),
        ("export", absent, tmp_path / "exported"),
    ):
        assert "no checkpoint of step 7; it has" in samestep(*command).message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.best.metric=bleu"], "evaluations give loss, accuracy, f1, matthews"),
        (["training.best.metric=heldout/loss"], "leave heldout/ out"),
        (["training.best.patience=0"], "patience must be at least 1"),
        (["training.evaluate_every=null"], "evaluate_every is null"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: list[str], message: str, task: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("train", task, f"output={tmp_path / 'run'}", *SETTINGS, *settings)
    assert message in result.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
