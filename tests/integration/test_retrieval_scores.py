"""Scores of retrieval: in the evaluations of a run, of a suite of folders, and after reranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import beir
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.parity.test_reranker import save

MEASURES = ("ndcg@10", "mrr@10", "recall@100", "map@20")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beir.write(tmp_path_factory.mktemp("collection") / "words")


def settings(collection: Path, **others: object) -> tuple[str, ...]:
    """Evaluations of steps 2 and 4, with large steps, so that the scores change."""
    section = {"path": str(collection), "measures": MEASURES, **others}
    steps = ("training.steps=4", "schedule.warmup_steps=0", "optimizer.lr=0.03")
    every = ("training.evaluate_every=2", "checkpoint.every=2")
    return (*steps, *every, f"training.retrieval={json.dumps(section)}")


def scores(run: Path) -> dict[int, dict[str, float]]:
    """The retrieval scores of each evaluation."""
    return {
        row["step"]: {name: row[f"heldout/{name}"] for name in MEASURES}
        for row in tasks.rows_of(run)
        if "heldout/loss" in row
    }


def evaluated(samestep: Samestep, tmp_path: Path, checkpoint: Path, *options: object) -> Any:
    file = tmp_path / "scores.json"
    result = samestep("evaluate", checkpoint, *options, "--scores", file)
    assert result.code == 0, result.err
    return json.loads(file.read_text())


@pytest.mark.long
def test_evaluations_have_the_scores_of_the_command_and_choose_the_best(
    experiment_file: str, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run, best = tmp_path / "run", 'training.best={metric: "ndcg@10"}'
    options = (*settings(collection), "tracking.tensorboard={}", f"output={run}")
    assert samestep("train", experiment_file, *options, best, "strategy=single").code == 0
    found = scores(run)
    assert list(found) == [2, 4]
    assert found[2] != found[4]
    retrieval = ("--retrieval", collection, "--measures", *MEASURES)
    for step, expected in found.items():
        folder = run / f"checkpoints/step-{step:08}"
        ours = evaluated(samestep, tmp_path, folder, *retrieval)
        assert {name: ours[name] for name in MEASURES} == expected
    meta = json.loads((run / "checkpoints/step-00000004/meta.json").read_text())
    assert meta["best"]["step"] == max(found, key=lambda step: found[step]["ndcg@10"])
    assert meta["best"]["value"] == max(each["ndcg@10"] for each in found.values())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = [event.value for event in events.Scalars("heldout/ndcg@10")]
    assert shown == pytest.approx([each["ndcg@10"] for each in found.values()])


@pytest.mark.long
@pytest.mark.parametrize(
    "others",
    [("strategy=ddp", "--processes", 2), ("strategy=fsdp", "--processes", 3)],
    ids=["ddp", "fsdp"],
)
def test_the_number_of_processes_changes_no_score(
    experiment_file: str,
    collection: Path,
    others: tuple[object, ...],
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    # Weights of equal bits: with others, documents of nearly equal similarity may change places.
    exact = ("training.exact=bitwise", "accelerator={kind: cpu, threads: 1}")
    train = ("train", experiment_file, *settings(collection), *exact)
    assert samestep(*train, "strategy=single", f"output={tmp_path / 'one'}").code == 0
    assert samestep(*train, *others, f"output={tmp_path / 'more'}").code == 0
    assert list(scores(tmp_path / "one")) == [2, 4]
    assert scores(tmp_path / "more") == scores(tmp_path / "one")


def test_a_suite_has_a_mean_and_a_damaged_folder_costs_no_other(
    finished_run: Path, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    other, damaged = (beir.write(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2)))
    alone = evaluated(samestep, tmp_path, finished_run, "--retrieval", collection)
    both = evaluated(samestep, tmp_path, finished_run, "--retrieval", collection, other)
    assert both["folders"]["words"] == alone
    assert both["mean"].keys() == alone.keys() - {"queries", "documents"}
    mean = (alone["ndcg@10"] + both["folders"]["a"]["ndcg@10"]) / 2
    assert both["mean"]["ndcg@10"] == pytest.approx(mean)
    (damaged / "qrels/test.tsv").unlink()
    file = tmp_path / "scores.json"
    folders = (collection, damaged, other)
    result = samestep("evaluate", finished_run, "--retrieval", *folders, "--scores", file)
    assert result.code == 1
    assert "1 of 3 folders have no scores" in result.err
    assert f"{damaged} has no qrels/test.tsv" in result.err
    found = json.loads(file.read_text())
    assert found["folders"] == both["folders"]
    assert list(found["failed"]) == ["b"]
    assert "mean" not in found
    assert f"{alone['ndcg@10']:.6f}" in result.out


@pytest.mark.long
def test_a_reranker_sorts_what_was_found(
    finished_run: Path, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    from trainer.inference.retrieval.rerank import CrossEncoder
    from trainer.training.retrieval.collection import Collection

    # A query is a document with all its words, and the reranker's weights are random.
    model = save(tmp_path / "model")
    retrieval = ("--retrieval", collection, "--measures", "ndcg@10", "recall@20")
    before = evaluated(samestep, tmp_path, finished_run, *retrieval)
    rerank = ("--rerank", model, "--rerank-top", 20)
    after = evaluated(samestep, tmp_path, finished_run, *retrieval, *rerank)
    assert {name: after[name] for name in before} == before
    assert after["reranked"]["recall@20"] == before["recall@20"]  # the same 20, in another order
    assert after["reranked"]["ndcg@10"] != before["ndcg@10"]
    # All documents: what the encoder thinks of them does not matter.
    alone = evaluated(samestep, tmp_path, finished_run, *retrieval, *rerank[:3], 90)
    read = Collection.read(collection, "test")
    names = list(read.documents)
    reranker = CrossEncoder(str(model), "--rerank", 64)
    rankings = reranker.reranked(read, [names] * len(read.queries), 90)
    assert alone["reranked"] == read.scores(("ndcg@10", "recall@20"), rankings)


@pytest.mark.long
def test_what_does_not_fit_is_named(
    finished_run: Path, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    evaluate = ("evaluate", finished_run, "--retrieval", collection)
    two = save(tmp_path / "two", labels=2)
    assert "two has 2 labels" in samestep(*evaluate, "--rerank", two).message
    assert "has the head language_model" in samestep(*evaluate, "--rerank", finished_run).message
    assert "needs --rerank" in samestep(*evaluate, "--rerank-top", 5).message
    options = ("--rerank", two, "--rerank-top", 0)
    assert "--rerank-top must be at least 1" in samestep(*evaluate, *options).message
    assert "--rerank needs --retrieval" in samestep("evaluate", "x", "--rerank", two).message
    assert "twice" in samestep(*evaluate, collection).message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, "has no qrels/dev.tsv"),
        ({"measures": ["ndcg"]}, "ndcg is no measure of rankings"),
        ({"measures": []}, "measures is empty"),
        ({"max_length": 33}, "texts of 3 to 32 tokens"),
        ({"max_length": 2}, "texts of 3 to 32 tokens"),
        ({"path": "s3://bucket/set"}, "Copy the folder to this machine"),
    ],
)
def test_settings_that_do_not_fit_end_the_run_before_it_starts(
    experiment_file: str,
    collection: Path,
    change: dict[str, object],
    message: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    options = (*settings(collection, **change), f"output={tmp_path / 'run'}")
    found = samestep("train", experiment_file, *options)
    assert found.code in (1, 2)
    assert message in found.message
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_scores_need_evaluations_and_a_best_score_that_exists(
    experiment_file: str, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    train = ("train", experiment_file, *settings(collection), f"output={tmp_path / 'run'}")
    never = "training.evaluate_every=null"
    assert "retrieval needs evaluations" in samestep(*train, never).message


@pytest.mark.long
def test_a_run_of_pairs_with_scores_is_a_reranker(
    finished_run: Path, dataset_folder: Path, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    steps = ("training.steps=7", "training.evaluate_every=7")
    tuned = tasks.tune("regression", tmp_path, finished_run, dataset_folder / "tokenizer", *steps)
    refused = samestep("train", tuned, f"training.retrieval.path={collection}")
    assert "embeddings, and this model has a head for classification" in refused.message
    retrieval = (
        "--retrieval",
        collection,
        "--rerank-top",
        30,
        "--measures",
        "ndcg@10",
        "recall@30",
    )
    rerank = ("--rerank", tmp_path / "run-regression")
    found = evaluated(samestep, tmp_path, finished_run, *retrieval, *rerank)
    assert found["reranked"]["recall@30"] == found["recall@30"]
    assert found["reranked"]["ndcg@10"] != found["ndcg@10"]
