"""Suites with models of word vectors: the recipes `cbow` and `bilstm_attention`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from samestep.errors import ConfigError
from tests.integration import commands, tasks
from tests.integration.commands import Samestep
from trainer.studies.finetune.runs import Run, Start, list_runs
from trainer.studies.finetune.task import find_tasks
from trainer.training.weights.loading import load_weights
from trainer.vectors.folder import WordVectors


def listed(
    recipe: str,
    checkpoint: Path,
    folder: Path,
    *overrides: str,
    starts: tuple[Start, ...] = ("random",),
) -> Run:
    chosen = find_tasks([str(tasks.write_task("classification", folder))], recipe)
    settings = ["accelerator=cpu", "model.embedding_width=16", *overrides]
    options = (folder, range(1), False, settings)
    (run,) = list_runs(str(checkpoint), chosen, *options, starts=starts)
    return run


@pytest.mark.long
def test_a_recipe_of_another_kind_has_the_checkpoint_s_vocabulary(
    finished_run: Path, tmp_path: Path
) -> None:
    run = listed("bilstm_attention", finished_run, tmp_path)
    model, before = run.experiment["model"], load_weights(str(finished_run)).config
    assert model["kind"] == "word_vectors"
    assert model["vocab_size"] == before.vocab_size
    assert model["sentences"]["attention"] is True
    assert len(model["labels"]) > 1
    assert "heads" not in model
    with pytest.raises(ConfigError, match=r"model.kind is word_vectors, .* Add --scratch-only"):
        listed("cbow", finished_run, tmp_path, starts=("checkpoint",))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["cbow", "bilstm_attention"])
def test_it_learns_a_task_from_vectors(
    recipe: str,
    finished_run: Path,
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    start: commands.Start,
) -> None:
    vectors = tmp_path / "vectors"
    options = ("--method", "glove", "--units", "tokens", "--dimensions", 16, "--min-count", 1)
    assert samestep("vectors", dataset_folder, *options, "--output", vectors).code == 0
    small = () if recipe == "cbow" else ("model.sentences.hidden_size=8",)
    batch = ("training.global_batch_size=12", "training.steps=60", "training.log_every=1")
    run = listed(recipe, finished_run, tmp_path, f"init_embeddings={vectors}", *small, *batch)
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps({**run.experiment}))))
    settings = ("optimizer.lr=2e-2", "schedule.warmup_steps=0", "optimizer.kind=adamw")
    trained = tmp_path / "trained"
    assert samestep("train", file, f"output={trained}", *settings).code == 0
    first, *_, last = [row for row in tasks.rows_of(trained) if "train/loss" in row]
    assert last["train/loss"] < first["train/loss"] - 0.1
    tasks.assert_same_in_three_processes(start, file, trained, tmp_path / "three", *settings)
    # Before the first step, the rows of known tokens are their vectors.
    still = tmp_path / "still"
    none = ("optimizer.lr=0.0", "schedule.warmup_steps=0", "training.steps=1")
    assert samestep("train", file, f"output={still}", *none, "training.evaluate_every=1").code == 0
    table = load_weights(str(still)).tensors["embeddings.tokens.weight"]
    given = WordVectors.load(str(vectors))
    assert given.tokens is not None
    assert torch.equal(table[given.tokens], torch.as_tensor(given.vectors))
