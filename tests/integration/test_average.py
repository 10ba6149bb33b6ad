"""The average of checkpoints, and what can be done with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.commands import Samestep, Start
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.meta import read_meta
from trainer.publish import average, export
from trainer.training.weights.loading import Weights, load_weights


@pytest.fixture(scope="module")
def run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 3, 6, 9 and 12."""
    from samestep.cli import main

    folder = tmp_path_factory.mktemp("averaged") / "run"
    settings = ["checkpoint={every: 3, keep_last: 9}", "training.evaluate_every=12"]
    assert main(["train", experiment_file, f"output={folder}", *settings]) == 0
    return folder


@pytest.mark.parametrize(
    ("options", "fractions"),
    [
        ([], {6: 1 / 3, 9: 1 / 3, 12: 1 / 3}),
        (["--decay", "0.5"], {6: 1 / 7, 9: 2 / 7, 12: 4 / 7}),
    ],
)
def test_weights_are_the_mean(
    run: Path, tmp_path: Path, samestep: Samestep, options: list[str], fractions: dict[int, float]
) -> None:
    result = samestep("average", run, tmp_path / "mean", "--last", "3", *options)
    assert (result.code, "the average of the steps 6, 9, 12" in result.err) == (0, True)
    found = load_weights(tmp_path / "mean").tensors
    each = {
        step: load_weights(run / "checkpoints" / f"step-{step:08d}").tensors for step in fractions
    }
    assert set(found) == set(each[12])
    for name in found:
        expected = sum(fraction * each[step][name].double() for step, fraction in fractions.items())
        torch.testing.assert_close(
            found[name], torch.as_tensor(expected).float(), rtol=1e-6, atol=1e-9
        )


def test_it_is_evaluated_exported_and_started_from(
    run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    mean = tmp_path / "mean"
    assert samestep("average", run, mean, "--last", "2").code == 0
    scores = [samestep("evaluate", folder) for folder in (mean, run)]
    assert [score.code for score in scores] == [0, 0]
    assert scores[0].out != scores[1].out
    assert samestep("export", mean, tmp_path / "exported").code == 0
    (loss,) = [line.split()[1] for line in scores[0].out.splitlines() if line.startswith("loss")]
    card = (tmp_path / "exported" / "README.md").read_text()
    (stored,) = [line.split("|")[2] for line in card.splitlines() if line.startswith("| loss |")]
    assert float(stored) == pytest.approx(float(loss), rel=1e-3)
    assert samestep("fill", mean, "the [MASK] of the module").code == 0
    more = ("training.steps=2", "schedule.warmup_steps=1", f"output={tmp_path / 'more'}")
    assert samestep("train", experiment_file, f"init_from={mean}", *more).code == 0


def test_weights_that_are_no_numbers_are_named(
    run: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "layers.1.ffn.down.weight"

    def damaged(path: Any) -> Weights:
        weights = load_weights(path)
        tensors = {each: tensor.clone() for each, tensor in weights.tensors.items()}
        tensors[name][3, 5] = float("inf")
        return replace(weights, tensors=StoredTensors.of(tensors))

    assert "infinity" not in samestep("export", run, tmp_path / "sound").err
    monkeypatch.setattr(average, "load_weights", damaged)
    monkeypatch.setattr(export, "load_weights", damaged)
    for command, shown in (
        (("average", run, tmp_path / "mean", "--last", "2"), name),
        (("export", run, tmp_path / "exported"), "bert.encoder.layer.1.output.dense.weight"),
    ):
        result = samestep(*command)
        assert result.code == 0
        assert f"{shown}, of {run}, has NaN or infinity in it" in result.err


def test_bad_input_is_refused(run: Path, tmp_path: Path, samestep: Samestep) -> None:
    for options, message in (
        (["--last", "1"], "--last is 1"),
        (["--last", "9"], "has 4 checkpoints, and --last is 9"),
        (["--decay", "1.5"], "--decay is 1.5"),
    ):
        result = samestep("average", run, tmp_path / "mean", *options)
        assert result.code != 0
        assert message in result.message
    assert not list(tmp_path.iterdir())
    assert "exists" in samestep("average", run, tmp_path, "--last", "2").message


def test_a_damaged_checkpoint_leaves_nothing_behind(
    run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (shard,) = (copy / "checkpoints" / "step-00000009").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    result = samestep("average", copy, tmp_path / "mean", "--last", "2")
    assert (result.code, "is damaged" in result.message) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_of_two_processes_with_one_folder_the_first_writes_it(
    run: Path, tmp_path: Path, samestep: Samestep, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, inner = tmp_path / "mean", average._write

    def overtaken(*arguments: Any) -> None:
        inner(*arguments)
        other = start("average", run, mean, "--last", "2").wait()
        assert other.code == 0, other.err

    monkeypatch.setattr(average, "_write", overtaken)
    result = samestep("average", run, mean, "--last", "3")
    assert result.code == 2
    assert f"cannot write {mean}: " in result.message
    assert read_meta(load_weights(mean).folder)["average"]["steps"] == [9, 12]
    assert not list(tmp_path.glob(".mean*"))
