"""Sentence embeddings: trained at any world size, exported for sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from samestep.cli import main
from tests.conformance.worker import run_once
from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks

STUDENT = {
    "kind": "bert",
    "vocab_size": 600,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "max_positions": 32,
    "attention_dropout": 0.0,
    "head": "embedding",
}


def pairs(count: int, begin: int = 0) -> list[dict[str, Any]]:
    """Texts about the same name belong together."""
    rows = []
    for number in range(begin, begin + count):
        name, other = tasks.NAMES[number % 9], tasks.NAMES[(number + 1 + number % 3) % 9]
        same = number % 3 < 2
        rows.append(
            {
                "a": " ".join(["the", name, *tasks._words(number, 2)]),
                "b": " ".join([*tasks._words(number + 7, 2), name if same else other]),
                "label": "same" if same else "other",
                "score": 5.0 if same else 0.0,
            }
        )
    return rows


@pytest.fixture(scope="module")
def folder(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Datasets and experiments of both objectives, by their names."""
    folder = tmp_path_factory.mktemp("embeddings")
    tasks.write(folder / "train.jsonl", pairs(240))
    tasks.write(folder / "dev.jsonl", pairs(60, 240))
    for name, kind in (("contrastive", "classification"), ("cosine", "regression")):
        source = {
            "kind": kind,
            "paths": [str(folder / "train.jsonl")],
            "heldout": [str(folder / "dev.jsonl")],
            "texts": ["a", "b"],
        }
        if kind == "classification":
            source["labels"] = ["other", "same"]
        data = {
            "source": source,
            "tokenizer": {"path": str(dataset_folder / "tokenizer")},
            "workers": 1,
            "output": str(folder / f"data-{name}"),
        }
        (folder / f"{name}-data.yaml").write_text(yaml.safe_dump(data))
        assert main(["data", "build", str(folder / f"{name}-data.yaml")]) == 0
        experiment = yaml.safe_load(
            tasks.write_experiment("regression", folder, finished_run).read_text()
        )
        experiment["data"] |= {"path": str(folder / f"data-{name}"), "sequence_length": 32}
        experiment["output"] = str(folder / f"run-{name}")
        experiment["objective"] = {"kind": name}
        if name == "contrastive":
            experiment["objective"]["positive"] = 1
        experiment["training"]["steps"] = 100
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(experiment))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", ["contrastive", "cosine"])
def test_embeddings_are_learned_and_exported(
    name: str, folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    assert samestep("train", folder / f"{name}.yaml", f"output={run}").code == 0
    values = list(losses(run).values())
    assert np.mean(values[-10:]) < 0.8 * np.mean(values[:10])
    scored = [row for row in tasks.rows_of(run) if "heldout/loss" in row][-1]
    if name == "cosine":
        assert scored["heldout/spearman"] > 0.7
    assert samestep("evaluate", run, "--predictions", tmp_path / "predictions.jsonl").code == 0
    assert samestep("replay", run, 10, "--exact").code == 0

    assert samestep("export", run, tmp_path / "hf").code == 0
    from sentence_transformers import SentenceTransformer  # takes seconds, so not in every worker

    theirs = SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    dev = pairs(60, 240)
    first, second = (theirs.encode([row[column] for row in dev]) for column in "ab")
    cosines = (first * second).sum(1)
    cosines /= np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    predicted = [json.loads(line)["prediction"] for line in lines]
    np.testing.assert_allclose(cosines, predicted, atol=1e-5)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "from sentence_transformers import SentenceTransformer" in card


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "{kind: deepspeed, stage: 3}"])
def test_negatives_are_those_of_the_whole_batch_at_any_world_size(
    strategy: str, folder: Path, tmp_path: Path
) -> None:
    """Three processes have 4 rows each, in micro-batches of at most 2."""
    tree = yaml.safe_load((folder / "contrastive.yaml").read_text())
    del tree["init_from"]
    tree["model"] = STUDENT
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
    settings = ["training.steps=6", "training.evaluate_every=null", f"output={tmp_path / 'run'}"]
    file = str(tmp_path / "file.yaml")
    (one,) = run_ranks(1, run_once, file, [*settings, "strategy=single"])
    micro = "training.micro_batch_size=2"
    found = run_ranks(3, run_once, file, [*settings, micro, f"strategy={strategy}"])[0]
    np.testing.assert_allclose(found, one, rtol=2e-6)


@pytest.fixture(scope="module")
def retrieval(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An experiment on rows with hard negatives, a smaller model, and dropout."""
    folder = tmp_path_factory.mktemp("retrieval")
    found = pairs(240)
    rows = [
        {
            "query": row["a"],
            "positive": row["b"],
            "negatives": [found[(number + step) % 240]["b"] for step in (5, 9, 31, 77)],
        }
        for number, row in enumerate(found)
        if row["label"] == "same"
    ]
    tasks.write(folder / "train.jsonl", rows[:120])
    tasks.write(folder / "dev.jsonl", rows[120:])
    data = {
        "source": {
            "kind": "retrieval",
            "paths": [str(folder / "train.jsonl")],
            "heldout": [str(folder / "dev.jsonl")],
        },
        "tokenizer": {"path": str(dataset_folder / "tokenizer")},
        "workers": 1,
        "output": str(folder / "data"),
    }
    (folder / "data.yaml").write_text(yaml.safe_dump(data))
    assert main(["data", "build", str(folder / "data.yaml")]) == 0
    file = tasks.write_experiment("regression", folder, finished_run)
    tree = yaml.safe_load(file.read_text())
    del tree["init_from"]
    tree["model"] = STUDENT
    tree["data"] |= {"path": str(folder / "data"), "sequence_length": 80}
    lengths = {"query_length": 14, "passage_length": 16}
    tree["objective"] = {"kind": "contrastive", "negatives": 3, **lengths}
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "{kind: deepspeed, stage: 2}"])
def test_hard_negatives_are_the_same_at_any_world_size_and_after_a_resume(
    strategy: str, retrieval: Path, tmp_path: Path
) -> None:
    """Two processes take eight steps of 12 rows, and three go on after the fourth."""
    file = str(retrieval)
    settings = ["training.evaluate_every=null", "checkpoint.every=4"]
    settings += ["training.global_batch_size=12", "training.steps=8"]
    alone = [*settings, "strategy=single", f"output={tmp_path / 'one'}"]
    (one,) = run_ranks(1, run_once, file, alone)
    shared = [*settings, f"strategy={strategy}", f"output={tmp_path / 'run'}"]
    two = run_ranks(2, run_once, file, [*shared, "training.micro_batch_size=4"])[0]
    np.testing.assert_allclose(two, one, rtol=1e-5)
    resumed = [*shared, "training.micro_batch_size=3"]
    three = run_ranks(3, run_once, file, resumed, 4)[0]
    np.testing.assert_allclose(three, one[4:], rtol=1e-5)


@pytest.mark.long
def test_retrieval_is_learned_and_its_ledger_verified(
    retrieval: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    settings = (f"output={run}", "training.steps=60", "training.evaluate_every=30")
    assert samestep("train", retrieval, *settings).code == 0
    values = list(losses(run).values())
    assert np.mean(values[-10:]) < 0.9 * np.mean(values[:10])
    scored = [row for row in tasks.rows_of(run) if "heldout/loss" in row][-1]
    assert 0 < scored["heldout/accuracy"] <= 1
    assert samestep("ledger", "verify", run).code == 0
    assert samestep("replay", run, 10, "--exact").code == 0
    shown = samestep("data", "show", retrieval.parent / "data", "--objective", retrieval).out
    assert shown.count("[0 ") == 3 * shown.count("[1 ") > 0
    more = ("objective.negatives=5", "data.sequence_length=112")
    few = samestep("train", retrieval, f"output={tmp_path / 'few'}", *more)
    assert few.code == 1
    assert "the row has 4 negatives and the objective reads 5" in few.message


def test_a_model_with_another_head_is_refused(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    model = f"model={json.dumps({**STUDENT, 'head': 'language_model'})}"
    result = samestep("train", folder / "cosine.yaml", f"output={tmp_path}", model)
    assert (result.code, "set model.head=embedding" in result.message) == (2, True), result.message


def test_pairs_of_a_label_that_the_dataset_has_not_are_refused(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """No pair would belong together, so nothing would be learned."""
    settings = (f"output={tmp_path / 'run'}", "objective.positive=2")
    result = samestep("train", folder / "contrastive.yaml", *settings)
    assert result.code == 2
    assert "objective.positive is 2, and the dataset has the labels other, same" in result.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
