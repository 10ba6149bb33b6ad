"""Models compared or combined: forgetting, distances of weights, ensembles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.cli import main
from tests.integration import tasks
from tests.integration.commands import Samestep
from trainer.inspect.distance import by_group, left_out
from trainer.training.weights.initial import with_encoder
from trainer.training.weights.loading import load_weights


@pytest.fixture(scope="module")
def tuned(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Three taggers that were fine-tuned from `finished_run` with different seeds."""
    folder = tmp_path_factory.mktemp("tuned")
    few = ("training.steps=15", "schedule.warmup_steps=2", "training.evaluate_every=15")
    experiment = tasks.tune("tagging", folder, finished_run, dataset_folder / "tokenizer", *few)
    runs = [folder / "run-tagging", folder / "second", folder / "third"]
    for seed, run in enumerate(runs[1:], start=1):
        assert main(["train", str(experiment), f"output={run}", f"seed={seed}", *few]) == 0
    return runs


def test_an_encoder_replaces_all_but_the_heads(finished_run: Path, tuned: list[Path]) -> None:
    before, after = load_weights(finished_run), load_weights(tuned[0])
    mixed = with_encoder(before, after)
    for name in before.tensors:
        source = before if name.startswith("head.") else after
        assert torch.equal(mixed.tensors[name], source.tensors[name]), name
    assert set(mixed.tensors) == set(before.tensors)


def test_forgetting_is_scored_and_the_run_s_own_scores_stay(
    finished_run: Path, tuned: list[Path], samestep: Samestep, tmp_path: Path
) -> None:
    def loss(*options: object) -> float:
        scores = tmp_path / "scores.json"
        done = samestep("evaluate", finished_run, "--scores", scores, "--processes", 1, *options)
        assert done.code == 0, done.err
        return float(json.loads(scores.read_text())["loss"])

    own = loss()
    stored = (finished_run / "scores.jsonl").read_bytes()
    assert loss("--encoder", finished_run) == own
    assert loss("--encoder", tuned[0]) != own
    assert (finished_run / "scores.jsonl").read_bytes() == stored


def test_an_encoder_of_another_architecture_is_refused(
    finished_run: Path, experiment_file: str, samestep: Samestep, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    narrow = ("training.steps=1", "schedule.warmup_steps=0", "model.ffn_width=40")
    assert samestep("train", experiment_file, f"output={other}", *narrow).code == 0
    failed = samestep("evaluate", finished_run, "--encoder", other, "--processes", 1)
    assert "is of another architecture than" in failed.message


def test_distances_are_relative_and_by_layer(
    finished_run: Path, tuned: list[Path], samestep: Samestep, tmp_path: Path
) -> None:
    file = tmp_path / "distances.json"
    done = samestep("checkpoint", "distance", finished_run, tuned[0], "--scores", file)
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    assert list(found)[-1] == "all"
    assert {"embeddings", "layers.0", "layers.1"} < found.keys()
    before, after = (load_weights(run).tensors for run in (finished_run, tuned[0]))
    names = [name for name in before if name.startswith("layers.1.")]
    old = torch.cat([before[name].flatten() for name in names]).double()
    new = torch.cat([after[name].flatten() for name in names]).double()
    expected = float((new - old).norm() / old.norm())
    assert found["layers.1"] == pytest.approx(expected, rel=1e-9)
    assert "head.classifier.weight" in done.out
    same = samestep("checkpoint", "distance", tuned[0], tuned[0], "--scores", file)
    assert same.code == 0
    assert set(json.loads(file.read_text()).values()) == {0.0}


def test_heads_of_two_kinds_are_not_compared(finished_run: Path) -> None:
    """Their parameters may have equal names and shapes, and the later ones are new."""
    before = load_weights(finished_run)
    after = replace(before, config=replace(before.config, head="tagging", labels=("a", "b")))
    assert "head" in by_group(before, before)
    assert "head" not in by_group(before, after)
    assert left_out(before, after) == sorted(
        name for name in before.tensors if name.startswith("head.")
    )


def test_an_ensemble_of_taggers_votes(
    tuned: list[Path], samestep: Samestep, tmp_path: Path
) -> None:
    single = []
    for number, run in enumerate(tuned):
        file = tmp_path / f"{number}.jsonl"
        assert samestep("evaluate", run, "--predictions", file, "--processes", 1).code == 0
        lines = map(json.loads, file.read_text().splitlines())
        single.append({line["row"]: line["prediction"] for line in lines})
    others = [word for run in tuned[1:] for word in ("--ensemble", run)]
    file = tmp_path / "all.jsonl"
    done = samestep("evaluate", tuned[0], *others, "--predictions", file, "--processes", 1)
    assert done.code == 0, done.err
    for line in map(json.loads, file.read_text().splitlines()):
        tags = np.array([member[line["row"]] for member in single])
        for votes, tag in zip(tags.T, line["prediction"], strict=True):
            names, counts = np.unique(votes, return_counts=True)
            assert counts[list(names).index(tag)] == counts.max()


def test_an_ensemble_needs_one_task(
    finished_run: Path, tuned: list[Path], samestep: Samestep
) -> None:
    failed = samestep("evaluate", finished_run, "--ensemble", finished_run, "--processes", 1)
    assert "--ensemble needs a run of a task" in failed.message
    failed = samestep("evaluate", tuned[0], "--ensemble", finished_run, "--processes", 1)
    assert "--ensemble needs a run of a task" in failed.message
    failed = samestep("evaluate", tuned[0], "--ensemble", tuned[1], "--generate")
    assert "has the head tagging, which generates no text" in failed.message
    both = ("--ensemble", tuned[1], "--encoder", finished_run)
    assert (
        "--encoder and --ensemble cannot be combined"
        in samestep("evaluate", tuned[0], *both).message
    )
