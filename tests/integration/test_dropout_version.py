"""A run keeps the masks of attention dropout that it began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import samestep
from samestep.config.tree import read_tree
from trainer.checkpoint import integrity
from trainer.checkpoint.meta import newest_meta
from trainer.training.starting import load_experiment

DROPOUT = ("model.attention_dropout=0.3", "checkpoint.every=6", "training.log_every=1")


def losses(file: str, output: Path, *overrides: str) -> dict[int, float]:
    experiment = load_experiment(file, [*DROPOUT, f"output={output}", *overrides])
    samestep.train(experiment)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def make_old(output: Path) -> None:
    """Removes the version from what a run has stored, as before there were two."""
    config = output / "config.yaml"
    lines = config.read_text().splitlines()
    kept = [line for line in lines if "dropout_version" not in line]
    assert len(kept) == len(lines) - 1
    config.write_text("\n".join(kept))


@pytest.mark.long
def test_old_runs_continue_with_their_masks_and_new_ones_have_others(
    experiment_file: str, tmp_path: Path
) -> None:
    first = losses(experiment_file, tmp_path / "whole", "training.dropout_version=1")
    second = losses(experiment_file, tmp_path / "new")
    assert first != second
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "whole", old)
    make_old(old)
    shutil.rmtree(integrity.step_folder(old / "checkpoints", 12))
    assert losses(experiment_file, old) == first
    assert read_tree(old / "config.yaml")["training"]["dropout_version"] == 1


def test_the_user_may_name_another_version(experiment_file: str, tmp_path: Path) -> None:
    output = tmp_path / "old"
    losses(experiment_file, output, "training.dropout_version=1", "training.steps=6")
    make_old(output)
    named = [f"output={output}", "training.dropout_version=2"]
    assert load_experiment(experiment_file, named).training.dropout_version == 2
    assert load_experiment(experiment_file, named[:1]).training.dropout_version == 1
    # On a new machine there are the checkpoints alone.
    checkpoints = output / "checkpoints"
    assert newest_meta(checkpoints)["config"]["training"]["dropout_version"] == 1
    elsewhere = [f"output={tmp_path / 'other'}", f"checkpoint.folder={checkpoints}"]
    assert load_experiment(experiment_file, elsewhere).training.dropout_version == 1


@pytest.mark.parametrize("version", ["3", "0"])
def test_other_versions_are_rejected(experiment_file: str, version: str) -> None:
    with pytest.raises(samestep.ConfigError, match="dropout_version"):
        load_experiment(experiment_file, [f"training.dropout_version={version}"])


def test_commands_that_only_read_ask_no_object_store(experiment_file: str, tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", "checkpoint.folder=s3://nowhere/run"]
    assert load_experiment(experiment_file, overrides, offline=True).training.dropout_version == 2
    (tmp_path / "config.yaml").write_text("training: {}\n")
    assert load_experiment(experiment_file, overrides, offline=True).training.dropout_version == 1


@pytest.mark.parametrize("wrong", ["checkpoint=3", "checkpoint.folder=3"])
def test_a_section_of_the_wrong_type_is_named(experiment_file: str, wrong: str) -> None:
    with pytest.raises(samestep.ConfigError, match="checkpoint"):
        load_experiment(experiment_file, [wrong])
