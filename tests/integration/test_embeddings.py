"""Sentence embeddings: trained at any world size, exported for sentence-transformers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
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
from trainer.inference.retrieval.sentences import SentenceEncoder
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.publish.export import export_weights
from trainer.training.starting import load_experiment
from trainer.training.weights.loading import load_weights

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


TEXTS = ["the fox", "over the lazy dog", "the quick brown fox and the dog " * 3]
PROMPTS = {"query": "find ", "document": "text "}
SHORT = ("training.evaluate_every=null", "schedule.warmup_steps=0")


@pytest.fixture(scope="module")
def short_run(folder: Path) -> Path:
    """A contrastive run of two steps."""
    run = folder / "short"
    settings = ("training.steps=2", f"output={run}", *SHORT)
    pooling = ("objective.pool=weighted", "objective.max_length=20", f"objective.prompts={PROMPTS}")
    assert main(["train", str(folder / "contrastive.yaml"), *settings, *pooling]) == 0
    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"pool": "weighted", "prompts": PROMPTS, "max_length": 8},
        {"pool": "first", "prompts": {"default": "text "}, "similarity": "dot"},
        {"pool": "last", "normalize": False},
        {"pool": "max", "normalize": True, "similarity": "dot"},
    ],
)
def test_every_pooling_is_exported(
    objective: dict[str, Any], short_run: Path, tmp_path: Path
) -> None:
    weights = replace(load_weights(short_run), objective={"pool": None, **objective})
    export_weights(weights, str(short_run), str(tmp_path / "hf"))
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(tmp_path / "hf"), device="cpu")
    ours = SentenceEncoder(str(tmp_path / "hf"))
    longest = objective.get("max_length", 32)
    assert ours.pooling == replace(Pooling.of_objective(objective), longest=longest)
    assert theirs.max_seq_length == longest
    assert theirs.similarity_fn_name == objective.get("similarity", "cosine")
    expected = {
        "query": theirs.encode_query(TEXTS),
        "document": theirs.encode_document(TEXTS),
        "default": theirs.encode(TEXTS),
    }
    for role, vectors in expected.items():
        found = ours(ours.for_role(role, TEXTS))  # type: ignore[arg-type]
        np.testing.assert_allclose(found, vectors, atol=2e-6)
    lengths = np.linalg.norm(expected["default"], axis=1)
    assert np.allclose(lengths, 1, atol=1e-5) == ours.pooling.normalize
    if "prompts" in objective and "query" in objective["prompts"]:
        assert not np.allclose(expected["query"], expected["document"])


@pytest.mark.long
def test_a_run_and_its_export_embed_alike_and_training_goes_on_from_both(
    short_run: Path,
    folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.json").write_text("[]")
    refused = samestep("export", short_run, "refused", "--scores", "none.json")
    assert refused.code != 0
    assert "Write it again with samestep evaluate --scores" in refused.message
    assert not (tmp_path / "refused").exists()
    (tmp_path / "scores.json").write_text('{"queries": 9, "ndcg@10": 0.25}')
    assert samestep("export", short_run, "hf", "--scores", "scores.json").code == 0
    run, exported = SentenceEncoder(str(short_run)), SentenceEncoder("hf")
    assert run.pooling == exported.pooling
    assert (run.pooling.pool, run.pooling.query, run.pooling.longest) == ("weighted", "find ", 20)
    np.testing.assert_array_equal(run(TEXTS), exported(TEXTS))

    again = [f"output={tmp_path / 'again'}", "training.steps=1", *SHORT]
    prompts = f"objective.prompts={PROMPTS}"
    for start in (short_run, tmp_path / "hf"):
        overrides = [*again, f"init_from={start}", prompts]
        settings = load_experiment(folder / "contrastive.yaml", overrides)
        found = settings.objective
        assert (found.pool, found.max_length) == ("weighted", 20)
        assert (found.normalize, found.similarity) == (True, "cosine")
    refused = samestep("train", folder / "contrastive.yaml", *again, "init_from=hf")
    assert refused.code == 2
    assert "does not say whether its texts begin with them" in refused.message
    assert samestep("train", folder / "contrastive.yaml", *again, "init_from=hf", prompts).code == 0
    # A run that has begun does not ask its start again.
    again[1] = "training.steps=2"
    assert samestep("train", folder / "contrastive.yaml", *again, "init_from=hf").code == 0
    assert SentenceEncoder("again").pooling == run.pooling

    card = (tmp_path / "hf" / "README.md").read_text()
    assert "- sentence-similarity\n- feature-extraction\n" in card
    for row in ("| pooling | weighted |", "scores:\n", "| ndcg@10 | 0.25 |", "length 1"):
        assert row in card
    (code,) = re.findall(r"```python\n(.*?)```\n", card, re.DOTALL)
    assert "encode_query" in code
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


@pytest.mark.long
def test_prompts_of_a_dataset_are_exported(
    folder: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    rows = [{"query": row["a"], "positive": row["b"]} for row in pairs(60)]
    tasks.write(tmp_path / "rows.jsonl", rows)
    prompts = {"query_prompt": "find ", "passage_prompt": "text "}
    data = {
        "source": {"kind": "retrieval", "paths": [str(tmp_path / "rows.jsonl")], **prompts},
        "tokenizer": {"path": str(dataset_folder / "tokenizer")},
        "workers": 1,
        "output": str(tmp_path / "data"),
    }
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data))
    assert samestep("data", "build", tmp_path / "data.yaml").code == 0
    run = ("training.steps=1", *SHORT, f"data.path={tmp_path / 'data'}", f"output={tmp_path / 'r'}")
    assert samestep("train", folder / "contrastive.yaml", *run, "objective.positive=0").code == 0
    assert samestep("export", tmp_path / "r", tmp_path / "hf").code == 0
    settings = json.loads((tmp_path / "hf" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == PROMPTS
    found = SentenceEncoder(str(tmp_path / "r")).pooling
    assert (found.query, found.document) == ("find ", "text ")


@pytest.mark.long
def test_lora_is_exported_in_the_weights_only(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    lora = (f"output={run}", "training.steps=1", *SHORT, "model.peft={kind: lora, rank: 4}")
    assert samestep("train", folder / "contrastive.yaml", *lora).code == 0
    refused = samestep("export", run, tmp_path / "adapter", "--adapter")
    assert (refused.code, "merges LoRA into the weights" in refused.message) == (2, True)
    assert samestep("export", run, tmp_path / "hf").code == 0
    ours, exported = (SentenceEncoder(str(place))(TEXTS) for place in (run, tmp_path / "hf"))
    np.testing.assert_allclose(exported, ours, atol=1e-5)


@pytest.mark.long
def test_a_regression_of_pairs_is_a_cross_encoder(
    folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its scores are the head's, and not squashed by a sigmoid."""
    monkeypatch.chdir(tmp_path)
    settings = ("objective={kind: regression}", "output=run", "training.steps=30")
    assert samestep("train", folder / "cosine.yaml", *settings).code == 0
    assert samestep("evaluate", "run", "--predictions", "predictions.jsonl").code == 0
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    predicted = np.array([json.loads(line)["prediction"] for line in lines])
    assert predicted.max() > 1
    assert samestep("export", "run", "hf").code == 0
    assert samestep("export", "hf", "again").code == 0
    from sentence_transformers import CrossEncoder

    dev = [(row["a"], row["b"]) for row in pairs(60, 240)]
    for name in ("hf", "again"):
        model = CrossEncoder(name, device="cpu")
        assert model.num_labels == 1
        np.testing.assert_allclose(model.predict(dev), predicted, atol=1e-5)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: text-ranking\n" in card
    assert "- cross-encoder\n" in card
    assert "pip install torch transformers sentence-transformers\n" in card
    assert "| spearman |" in card
    (code,) = re.findall(r"```python\n(.*?)```\n", card, re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[")


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
