"""The whole way through the installed command, and every configuration and kind that there is."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building.config import Config as BuildConfig
from samestep.config import Kinds, decode, dump, load, to_tree
from tests.integration.commands import SAMESTEP, Samestep, Start, losses
from trainer.studies.finetune.task import Task
from trainer.training.experiment import Experiment

CONFIGS = sorted(
    path for path in Path("configs").rglob("*.yaml") if path.parts[1] not in ("launch", "sweeps")
)
PACKAGES = [
    *(
        "trainer.models.families",
        "trainer.objectives.kinds",
        "trainer.optim.kinds",
        "trainer.strategies.kinds",
        "trainer.accelerators.kinds",
    ),
    "data_pipeline.sources.kinds",
]
KINDS = [(package, kind) for package in PACKAGES for kind in Kinds(package).available()]


def test_from_training_to_a_filled_mask(
    start: Start, samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """A run that went back to its last but one checkpoint scores, exports and fills as one that
    never stopped.
    """
    run = tmp_path / "run"
    overrides = [f"output={run}", "checkpoint.every=4", "training.evaluate_every=12"]
    assert start("train", experiment_file, *overrides).wait().code == 0
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    assert samestep("train", experiment_file, *overrides).code == 0
    assert list(losses(run)) == list(range(1, 13))
    np.testing.assert_allclose(
        list(losses(run).values()), list(losses(finished_run).values()), rtol=1e-5
    )

    scores = [samestep("evaluate", folder).out.split() for folder in (run, finished_run)]
    assert scores[0][::2] == ["step", "loss", "accuracy", "perplexity"]
    np.testing.assert_allclose(
        [float(x) for x in scores[0][1::2]], [float(x) for x in scores[1][1::2]], rtol=1e-4
    )
    assert samestep("evaluate", run, "--step", 8).out.split()[1] == "8"

    exported = tmp_path / "exported"
    assert samestep("export", run, exported).code == 0
    filled = [
        samestep("fill", source, "the [MASK] is", "--top", 3).out for source in (run, exported)
    ]
    assert filled[0] == filled[1]
    assert filled[0].count("the ") >= 3


def test_a_reader_that_leaves_early_is_no_error(
    samestep: Samestep, experiment_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `samestep config FILE | head -1` may do."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        result = samestep("config", experiment_file)
    assert (result.code, result.err) == (0, "")


def leases_of(run: Path) -> set[str]:
    """Names of the leases; each start takes one."""
    return {file.name for file in (run / "checkpoints").glob(".lease-*")}


def content_of(run: Path) -> dict[Path, bytes]:
    """All files but leases."""
    files = [file for file in run.rglob("*") if file.is_file()]
    return {file: file.read_bytes() for file in files if file.name not in leases_of(run)}


def test_finished_run(samestep: Samestep, finished_run: Path) -> None:
    """Started again it says that there is nothing to do, and changes nothing."""
    before, leases = content_of(finished_run), leases_of(finished_run)
    result = samestep("train", finished_run / "config.yaml")
    assert result.code == 0
    assert "nothing to do" in result.err
    assert "raise training.steps" in result.err
    assert before == content_of(finished_run)
    assert leases_of(finished_run) - leases == {f".lease-{1 + len(leases):08d}"}


def test_finished_run_with_other_settings(samestep: Samestep, finished_run: Path) -> None:
    """It would be taken for a run with these settings."""
    result = samestep("train", finished_run / "config.yaml", "optimizer.lr=0.5")
    assert result.code == 2
    assert "is finished, and was trained with other settings (optimizer.lr: " in result.message
    assert " -> 0.5). Set output to a new folder" in result.message
    elsewhere = samestep("train", finished_run / "config.yaml", "strategy=ddp")
    assert elsewhere.code == 0
    assert "nothing to do" in elsewhere.err


def test_fewer_steps_than_an_unfinished_run_has_taken(
    samestep: Samestep, finished_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    command = ("train", run / "config.yaml", f"output={run}")
    for steps in (6, 8):
        result = samestep(*command, f"training.steps={steps}")
        assert result.code == 2
        assert f"is at step 8 of 12, and with other settings (training.steps: 12 -> {steps})" in (
            result.message
        )
        assert "finished" not in result.message
    assert samestep(*command).code == 0
    assert "is finished, and was trained" in samestep(*command, "training.steps=8").message


def test_moved_run(samestep: Samestep, finished_run: Path, tmp_path: Path) -> None:
    """A run is evaluated where it lies, not where it was trained."""
    moved = Path(shutil.copytree(finished_run, tmp_path / "moved"))
    shutil.rmtree(moved / "checkpoints" / "step-00000012")
    assert samestep("evaluate", moved).out.split()[1] == "8"


@pytest.mark.long
def test_start_from_weights(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """A new run starts from a run's weights or from their Hugging Face export, and both are the
    same start.
    """
    exported = tmp_path / "exported"
    assert samestep("export", finished_run, exported).code == 0
    started = {}
    for name, source in (("run", finished_run), ("exported", exported), ("drawn", "null")):
        overrides = [f"output={tmp_path / name}-next", f"init_from={source}", "training.steps=4"]
        assert samestep("train", experiment_file, *overrides).code == 0
        started[name] = losses(tmp_path / f"{name}-next")
    assert started["run"] == started["exported"]
    assert started["run"][1] < started["drawn"][1]


@pytest.mark.long
def test_config_command(experiment_file: str, tmp_path: Path) -> None:
    """It prints every setting, and what it prints is a configuration that resolves to itself."""
    command = [*SAMESTEP, "config", experiment_file, "optimizer.lr=5e-4", "tracking.wandb={}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (tmp_path / "resolved.yaml").write_text(printed)
    resolved = load(Experiment, str(tmp_path / "resolved.yaml"))
    assert resolved == load(Experiment, experiment_file, command[3:])
    assert "lr: 0.0005" in printed
    assert "collective_timeout: 60.0" in printed


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_named_configuration(path: Path, tmp_path: Path) -> None:
    """Each file under configs/ resolves, stays short, and its resolved form resolves to itself."""
    assert len(path.read_text().splitlines()) < 40
    if path.parts[1] == "tasks":
        assert (
            len(path.parts) == 3 or Task.read(path).config.score
        )  # what is in no folder is the base of others
        return
    if path.parts[1] == "studies":
        return  # tests/unit/studies/test_study_files.py
    schema = BuildConfig if path.parts[1] == "data" else Experiment
    config = load(schema, str(path))
    (tmp_path / "resolved.yaml").write_text(dump(config))
    assert load(schema, str(tmp_path / "resolved.yaml")) == config


@pytest.mark.parametrize(("package", "kind"), KINDS)
def test_kind(package: str, kind: str) -> None:
    """A module that `kind` can name has a frozen `Config`, which comes back from the tree that it
    is written as.
    """
    schema = importlib.import_module(f"{package}.{kind}").Config
    assert schema.__dataclass_params__.frozen
    required = {
        "vocab_size": 100,
        "paths": ["a"],
        "path": "a",
        "source_paths": ["a"],
        "target_paths": ["a"],
    }
    of = "prefix_lm" if kind == "multi_task" else "classification"
    required |= {"teacher": "runs/teacher", "of": of, "scheme": "bert"}
    if package == "data_pipeline.sources.kinds":
        required |= {"labels": ["O", "B-X"], "choices": ["a", "b"]}
    config = decode(
        schema, {f.name: required[f.name] for f in dataclasses.fields(schema) if f.name in required}
    )
    assert decode(schema, to_tree(config)) == config
    assert Kinds(package).kind_of(config) == kind
