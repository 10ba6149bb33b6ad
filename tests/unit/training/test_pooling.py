"""Settings of pooling that are null follow the folder that a run starts from, and the dataset."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import ConfigError
from trainer.training.experiment import Experiment
from trainer.training.starting import load_experiment
from trainer.training.weights import pooling

CLASSIFICATION = {"kind": "classification"}
RETRIEVAL = {"kind": "retrieval", "query_prompt": "q: ", "passage_prompt": "p: "}
MODEL = {"kind": "bert", "vocab_size": 64, "layers": 1, "width": 8, "heads": 2, "ffn_width": 8}


def published(folder: Path, **prompts: str) -> Path:
    """A folder of sentence-transformers, as far as training reads its settings."""
    types = [f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling")]
    paths = ("", "1_Pooling")
    files = {
        "config.json": {"model_type": "bert"},
        "modules.json": [
            {"type": kind, "path": path} for kind, path in zip(types, paths, strict=True)
        ],
        "1_Pooling/config.json": {"pooling_mode": "cls"},
        "sentence_bert_config.json": {"max_seq_length": 48, "do_lower_case": True},
        "config_sentence_transformers.json": {"similarity_fn_name": "dot", "prompts": prompts},
    }
    (folder / "1_Pooling").mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads an experiment on datasets with the given `source` sections."""

    def load(init_from: Path | None, sources: list[Any], **objective: Any) -> Experiment:
        manifests = {
            str(number): SimpleNamespace(manifest=SimpleNamespace(source=source))
            for number, source in enumerate(sources)
        }
        monkeypatch.setattr(DataConfig, "open", lambda data: manifests)
        monkeypatch.setattr(pooling, "named_sources", lambda dataset: dataset)
        tree = {
            "output": str(tmp_path / "run"),
            "model": {**MODEL, "head": "embedding"},
            "objective": {"kind": "contrastive", **objective},
            "data": {"path": "unused", "sequence_length": 32},
            "training": {"steps": 4, "global_batch_size": 4},
            "optimizer": {"kind": "adamw", "lr": 1e-3},
            "init_from": None if init_from is None else str(init_from),
        }
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
        return load_experiment(tmp_path / "file.yaml")

    return load


def test_null_takes_what_the_folder_says(
    load: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(tmp_path / "published")
    with caplog.at_level(logging.INFO):
        found = load(folder, [CLASSIFICATION], max_length=32).objective
    assert (found.pool, found.normalize, found.similarity) == ("first", False, "dot")
    assert (found.max_length, found.prompts, found.compares) == (32, None, "dot")
    said = "\n".join(caplog.messages)
    assert f"texts are embedded as {folder} does: pool 'first', normalize False" in said
    assert f"objective.max_length is 32, and {folder} has 48" in said
    assert f"{folder} lower-cases texts" in said


def test_without_a_folder_nothing_is_replaced(load: Any) -> None:
    found = load(None, [CLASSIFICATION]).objective
    assert [found.pool, found.normalize, found.similarity] == [None] * 3
    assert [found.max_length, found.prompts] == [None] * 2


def test_prompts_are_those_of_the_dataset(
    load: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(tmp_path / "published", query="find: ")
    expected = {"query": "q: ", "document": "p: "}
    assert load(None, [RETRIEVAL, RETRIEVAL]).objective.prompts == expected
    assert load(folder, [RETRIEVAL]).objective.prompts == expected
    assert "has the prompts {'query': 'find: '}, and the dataset was built with" in caplog.text
    with pytest.raises(ConfigError, match=r"prompts is .*'x'}, and the dataset was built"):
        load(None, [RETRIEVAL], prompts={"query": "x"})
    with pytest.raises(ConfigError, match=r"does not say whether .* Set objective.prompts"):
        load(folder, [CLASSIFICATION])
    assert load(folder, [CLASSIFICATION], prompts={}).objective.prompts == {}


def test_a_run_that_has_begun_keeps_its_own(load: Any, tmp_path: Path) -> None:
    first = load(published(tmp_path / "published"), [CLASSIFICATION])
    begun = {"objective": {"pool": "last", "prompts": {"query": "q: "}}}
    plain = load(None, [CLASSIFICATION])
    found = pooling.with_pooling(plain, begun).objective
    assert (found.pool, found.prompts, found.normalize) == ("last", {"query": "q: "}, None)
    assert pooling.with_pooling(first, begun).objective.pool == "first"
