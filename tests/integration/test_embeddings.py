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
from tests import beir
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
    source = {"kind": "retrieval", "paths": [str(tmp_path / "rows.jsonl")], **prompts}
    dataset = tasks.build_rows(tmp_path, source, dataset_folder / "tokenizer")
    run = ("training.steps=1", *SHORT, f"data.path={dataset}", f"output={tmp_path / 'r'}")
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


@pytest.fixture(scope="module")
def retrieval(dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    lengths = {"query_length": 14, "passage_length": 16}
    objective = {"kind": "contrastive", "negatives": 3, **lengths}
    tokenizer = dataset_folder / "tokenizer"
    tree = tasks.retrieval(folder, rows, 120, tokenizer, 80, model=STUDENT, objective=objective)
    file = folder / "retriever.yaml"
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


@pytest.mark.long
def test_scores_of_retrieval_during_training_pool_as_the_objective_does(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Also of a task, whose best score is checked before the run begins."""
    collection, run = beir.write(tmp_path / "set"), tmp_path / "run"
    measures = ["ndcg@10", "recall@20"]
    retrieval = {"path": str(collection), "measures": measures}
    pooling = {"pool": "weighted", "max_length": 12, "prompts": {"query": "the ", "document": "a "}}
    settings = (
        *(f"objective.{name}={json.dumps(value)}" for name, value in pooling.items()),
        *("training.steps=4", "training.evaluate_every=2", "checkpoint.every=2"),
        f"training.retrieval={json.dumps(retrieval)}",
        'training.best={metric: "ndcg@10"}',
        *("schedule.warmup_steps=0", "optimizer.lr=0.03", f"output={run}"),
        *("strategy=ddp", "--processes", 2),
    )
    assert samestep("train", folder / "contrastive.yaml", *settings).code == 0
    rows = [row for row in tasks.rows_of(run) if "heldout/ndcg@10" in row]
    assert [row["step"] for row in rows] == [2, 4]
    file = tmp_path / "scores.json"
    evaluate = ("--retrieval", collection, "--scores", file, "--measures", *measures)
    found = []
    for options in ((), ("--pool", "mean")):
        for row in rows:
            step = run / f"checkpoints/step-{row['step']:08}"
            assert samestep("evaluate", step, *evaluate, *options).code == 0
            scores = json.loads(file.read_text())
            found.append([scores[name] for name in measures])
    expected = [[row[f"heldout/{name}"] for name in measures] for row in rows]
    assert found[:2] == [pytest.approx(each, abs=1e-6) for each in expected]
    assert found[2:] != expected
