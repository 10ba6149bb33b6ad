"""Rerankers: trained, scored, exported for sentence-transformers, and used as teachers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from samestep import NumberPrediction, load_model
from samestep.cli import main
from tests.integration import tasks
from tests.integration.commands import Samestep, Start, losses
from tests.parity.test_predict import folder_of

NEGATIVES = 2
SOURCE = "retrieval"


def rows(count: int, begin: int = 0) -> list[dict[str, Any]]:
    """The passage with the query's name is the right one."""
    found = []
    for number in range(begin, begin + count):
        name, *others = (tasks.NAMES[(number + step) % 9] for step in (0, 1 + number % 3, 5))
        passages = [
            " ".join([*tasks._words(number + place, 2), each])
            for place, each in enumerate((name, *others))
        ]
        found.append({"query": f"the {name}", "positive": passages[0], "negatives": passages[1:]})
    return found


def build(train: Path, dev: Path, tokenizer: Path, output: Path) -> None:
    source = {"kind": SOURCE, "paths": [str(train)], "heldout": [str(dev)]}
    tree = {"source": source, "tokenizer": {"path": str(tokenizer)}, "workers": 1}
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree | {"output": str(output)}))
    assert main(["data", "build", str(file)]) == 0


@pytest.fixture(scope="module")
def folder(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a dataset and an experiment, ranking.yaml."""
    folder = tmp_path_factory.mktemp("ranking")
    train = tasks.write(folder / "train.jsonl", rows(240))
    dev = tasks.write(folder / "dev.jsonl", rows(60, 240))
    build(train, dev, dataset_folder / "tokenizer", folder / "data")
    experiment = yaml.safe_load(
        tasks.write_experiment("regression", folder, finished_run, steps=120).read_text()
    )
    experiment["data"]["path"] = str(folder / "data")
    experiment["objective"] = {"kind": "ranking", "loss": "softmax", "negatives": NEGATIVES}
    (folder / "ranking.yaml").write_text(yaml.safe_dump(experiment))
    return folder


@pytest.mark.long
def test_a_reranker_learns_and_its_scores_are_the_same_everywhere(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    assert samestep("train", folder / "ranking.yaml", f"output={run}").code == 0
    (last,) = (row for row in tasks.rows_of(run) if "heldout/ndcg" in row)
    assert last["heldout/accuracy"] > 0.5  # by chance, 1 / 3
    predictions = tmp_path / "predictions.jsonl"
    evaluated = samestep("evaluate", run, "--predictions", predictions)
    assert f"ndcg         {last['heldout/ndcg']:.6g}" in evaluated.out
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    ranks = np.array([line["rank"] for line in lines])
    assert (ranks == 1).mean() == pytest.approx(last["heldout/accuracy"])
    scores = np.array([line["scores"] for line in lines])

    dev = rows(60, 240)
    pairs = [
        (row["query"], passage) for row in dev for passage in (row["positive"], *row["negatives"])
    ]
    found = load_model(run).predict(pairs)
    values = [each.value for each in found if isinstance(each, NumberPrediction)]
    expected = np.reshape(values, (60, 3))
    expected[:, 1:] = -np.sort(-expected[:, 1:])
    np.testing.assert_allclose(scores, expected, atol=1e-5)

    labeled = tmp_path / "labeled.jsonl"
    texts = ("--texts", "query", "positive", "--output", labeled)
    assert samestep("label", run, folder / "dev.jsonl", *texts).code == 0
    taught = [json.loads(line)["score"] for line in labeled.read_text().splitlines()]
    np.testing.assert_allclose(taught, scores[:, 0], atol=1e-5)

    every = ("--passages", "--output", tmp_path / "scored.jsonl")
    assert samestep("label", run, folder / "dev.jsonl", *every).code == 0
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [row["negatives"] for row in scored] == [row["negatives"] for row in dev]
    np.testing.assert_allclose(np.ravel([row["scores"] for row in scored]), values, atol=1e-5)

    assert samestep("export", run, tmp_path / "hf").code == 0
    import torch
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(tmp_path / "hf"), device="cpu", max_length=24)
    raw = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(raw, values, atol=1e-5)

    # Published cross-encoders have a label without a name. The head stays.
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": None}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    start = ("training.steps=1", "training.evaluate_every=1", "optimizer.lr=1e-9")
    again = (f"output={tmp_path / 'again'}", f"init_from={tmp_path / 'hf'}")
    assert (
        samestep("train", folder / "ranking.yaml", *again, *start, "schedule.warmup_steps=0").code
        == 0
    )
    (first,) = (row for row in tasks.rows_of(tmp_path / "again") if "heldout/ndcg" in row)
    for name in ("loss", "ndcg"):
        assert first[f"heldout/{name}"] == pytest.approx(last[f"heldout/{name}"], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["mse", "margin_mse", "kl"])
def test_a_student_learns_a_teachers_scores(
    loss: str, folder: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """They are from -1 to 1 in the order of the passages, so the last one is the best."""
    files = []
    for name in ("train", "dev"):
        found = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        scored = [{**row, "scores": [-1.0, 0.0, 1.0]} for row in found]
        for row in scored:
            row["positive"], *row["negatives"] = (
                f"{word} {text}"
                for word, text in zip(
                    ("class", "file", "value"), (row["positive"], *row["negatives"]), strict=True
                )
            )
        files.append(tasks.write(tmp_path / f"{name}.jsonl", scored))
    build(*files, dataset_folder / "tokenizer", tmp_path / "data")
    run = tmp_path / "run"
    settings = (f"output={run}", f"data.path={tmp_path / 'data'}", f"objective.loss={loss}")
    assert samestep("train", folder / "ranking.yaml", *settings, "training.steps=60").code == 0
    values = list(losses(run).values())
    assert np.mean(values[-5:]) < 0.5 * np.mean(values[:5])
    (last,) = (row for row in tasks.rows_of(run) if "heldout/mrr" in row)
    assert last["heldout/mrr"] == pytest.approx(1 / 3, abs=0.05)  # the positive is the worst


@pytest.mark.long
def test_losses_are_the_same_in_three_processes(
    folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    settings = ("training.steps=6", "training.evaluate_every=null", "objective.loss=pairwise")
    run = tmp_path / "run"
    assert samestep("train", folder / "ranking.yaml", f"output={run}", *settings).code == 0
    settings = (*settings, "training.micro_batch_size=2")
    tasks.assert_same_in_three_processes(
        start, folder / "ranking.yaml", run, tmp_path / "three", *settings
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"positive": ["a cat", ""]}, "empty text 2, counted from the query"),
        ({"positive": None}, "a query or passage is not text: None"),
        ({"negatives": ["a dog", 3]}, "a query or passage is not text: 3"),
        ({"query": ["a dog"]}, "a query or passage is not text: ['a dog']"),
        ({"query": "\ud800"}, "invalid Unicode"),
    ],
)
def test_rows_whose_passages_cannot_be_scored_are_named_or_skipped(
    row: dict[str, Any], message: str, tmp_path: Path, samestep: Samestep
) -> None:
    teacher = folder_of("SequenceClassification", tmp_path / "teacher", "score")
    good = {"query": "the dog", "positive": "dog", "negatives": ["cat", "the"], "id": 7}
    file = tasks.write(tmp_path / "rows.jsonl", [{**good, **row}, good])
    command = ("label", teacher, file, "--passages", "--output", tmp_path / "scored.jsonl")
    result = samestep(*command)
    assert result.code == 1
    assert f"rows.jsonl:1: {message}" in result.message
    assert samestep(*command, "--on-error", "skip").code == 0
    (scored,) = (tmp_path / "scored.jsonl").read_text().splitlines()
    assert json.loads(scored)["id"] == 7
    assert len(json.loads(scored)["scores"]) == 3


def test_passages_need_a_teacher_with_one_score(tmp_path: Path, samestep: Samestep) -> None:
    teacher = folder_of("SequenceClassification", tmp_path / "teacher", "bad", "good")
    file = tasks.write(tmp_path / "rows.jsonl", rows(1))
    result = samestep("label", teacher, file, "--passages", "--output", tmp_path / "scored.jsonl")
    assert result.code == 2
    assert "--passages is for a query, passages and a teacher with one score" in result.message


def test_a_head_with_several_scores_and_rows_without_a_teacher_are_refused(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    settings = ("objective.loss=kl", f"output={tmp_path / 'run'}")
    result = samestep("train", folder / "ranking.yaml", *settings)
    assert result.code == 2
    assert "objective.loss=kl compares with a teacher's scores, and" in result.message
    model = {"kind": "bert", "vocab_size": 700, "head": "classification", "labels": ["a", "b"]}
    settings = ("init_from=null", f"model={json.dumps(model)}", f"output={tmp_path}")
    result = samestep("train", folder / "ranking.yaml", *settings)
    assert result.code == 2
    assert "model.labels is a, b, and a passage has one score" in result.message


@pytest.mark.long
def test_embeddings_learn_a_teachers_scores_at_any_world_size(
    folder: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    scored = [{**row, "scores": [3.0, 1.0, -1.0]} for row in rows(120)]
    files = (tasks.write(tmp_path / f"{name}.jsonl", scored) for name in ("train", "dev"))
    build(*files, dataset_folder / "tokenizer", tmp_path / "data")
    objective = {
        "kind": "contrastive",
        "negatives": 2,
        "query_length": 16,
        "passage_length": 16,
        "temperature": 0.5,
        "distill": {"loss": "kl", "weight": 2.0},
    }
    tree = yaml.safe_load((folder / "ranking.yaml").read_text()) | {"objective": objective}
    tree["data"] |= {"path": str(tmp_path / "data"), "sequence_length": 64}
    file = tmp_path / "distill.yaml"
    file.write_text(yaml.safe_dump(tree))
    settings = ("training.steps=12", "training.evaluate_every=null")
    run = tmp_path / "run"
    assert samestep("train", file, f"output={run}", *settings).code == 0
    values = list(losses(run).values())
    assert values[-1] < values[0]
    settings = (*settings, "training.micro_batch_size=2")
    tasks.assert_same_in_three_processes(start, file, run, tmp_path / "three", *settings)
    plain = (f"output={tmp_path / 'plain'}", "objective.distill=null", *settings)
    assert samestep("train", file, *plain).code == 0
    (first, *_) = losses(tmp_path / "plain").values()
    assert first < values[0] - 0.1
