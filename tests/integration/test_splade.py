"""Sparse embeddings: trained at any world size, scored, searched, exported for SparseEncoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import samestep as library
from tests import beir
from tests.conformance.worker import run_once
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.integration.test_embeddings import SHORT, STUDENT, pairs
from tests.processes import run_ranks
from trainer.inference.retrieval.sentences import SentenceEncoder
from trainer.inference.retrieval.vectors import Vectors
from trainer.training.starting import load_experiment

PROMPTS = {"query_prompt": "the ", "passage_prompt": "a "}
TEXTS = ["the fox", "over the lazy dog", "the quick brown fox and the dog " * 3]


@pytest.fixture(scope="module")
def file(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An experiment on rows with a hard negative."""
    folder = tmp_path_factory.mktemp("splade")
    found = pairs(90)
    rows = [
        {"query": row["a"], "positive": row["b"], "negatives": [found[(number + 5) % 90]["b"]]}
        for number, row in enumerate(found)
        if row["label"] == "same"
    ]
    path = str(tasks.write(folder / "train.jsonl", rows))
    source = {"kind": "retrieval", "paths": [path], **PROMPTS}
    dataset = tasks.build_rows(folder, source, dataset_folder / "tokenizer", heldout_fraction=0.2)
    file = tasks.write_experiment("regression", folder, finished_run)
    tree = yaml.safe_load(file.read_text())
    tree["data"] |= {"path": str(dataset), "sequence_length": 56}
    lengths = {"query_length": 16, "passage_length": 20, "max_length": 24}
    flops = {"flops_query": 1e-2, "flops_passage": 1e-2, "flops_warmup_steps": 4}
    tree["objective"] = {"kind": "splade", "negatives": 1, **lengths, **flops}
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beir.write(tmp_path_factory.mktemp("collection") / "set")


@pytest.fixture(scope="module")
def run(file: Path, collection: Path) -> Path:
    """A run of 8 steps, with scores of retrieval."""
    from samestep.cli import main

    run = file.parent / "run"
    retrieval = json.dumps({"path": str(collection), "measures": ["ndcg@10"]})
    settings = ["training.steps=8", "training.evaluate_every=8", "schedule.warmup_steps=0"]
    settings += [f"output={run}", f"training.retrieval={retrieval}"]
    assert main(["train", str(file), *settings]) == 0
    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def scores(samestep: Samestep, model: Path, collection: Path, *more: Any) -> dict[str, float]:
    output = collection.parent / f"{model.name}-{len(more)}.json"
    output.unlink(missing_ok=True)
    command = ("evaluate", model, "--retrieval", collection, "--scores", output)
    assert samestep(*command, *more).code == 0
    return json.loads(output.read_text())  # type: ignore[no-any-return]


def test_a_run_is_scored_in_training_and_after_it(
    run: Path, collection: Path, samestep: Samestep
) -> None:
    first, *_, last = tasks.rows_of(run)
    assert first["train/loss"] > 0
    for name in ("flops_query", "flops_passage", "active_query", "active_passage"):
        assert first[f"train/{name}"] > 0
        assert last[f"heldout/{name}"] > 0
    found = scores(samestep, run, collection, "--max-length", 24)
    assert last["heldout/ndcg@10"] == pytest.approx(found["ndcg@10"], abs=1e-6)
    assert samestep("replay", run, 6, "--exact").code == 0


@pytest.mark.long
def test_a_run_is_planned(file: Path, samestep: Samestep) -> None:
    plan = samestep("plan", file, "--devices", 2, "--memory", "16GiB", "--json")
    assert plan.code == 0, plan.message


def test_sparse_vectors_are_stored_and_searched(
    run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    rows = [{"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS * 3)]
    corpus = tasks.write(tmp_path / "corpus.jsonl", rows)
    encoder = SentenceEncoder(str(run))
    expected = encoder(encoder.for_role("document", TEXTS * 3)).numpy()
    assert 0 < (expected == 0).mean() < 1
    for number, tolerance in (("float32", 0), ("float16", 1e-3), ("int8", 1e-2)):
        folder = tmp_path / number
        options = ("--output", folder, "--dtype", number, "--texts-per-file", 4)
        assert samestep("embed", run, corpus, *options).code == 0
        blocks = [block.numpy() for _, block in Vectors.open(folder).blocks()]
        np.testing.assert_allclose(np.concatenate(blocks), expected, rtol=0, atol=tolerance + 1e-6)
    import scipy.sparse

    folder = tmp_path / "float32"
    parts = [np.load(folder / f"00001{what}.npy") for what in ("", ".columns", ".offsets")]
    csr = scipy.sparse.csr_matrix(tuple(parts), (4, encoder.width))
    np.testing.assert_allclose(csr.toarray(), expected[4:8], atol=1e-6)
    result = samestep("search", run, folder, corpus, "--top", 2)
    hits = [json.loads(line)["hits"] for line in result.out.splitlines()]
    queries = encoder(encoder.for_role("query", TEXTS * 3)).numpy()
    highest = np.sort(queries @ expected.T, 1)[:, :-3:-1]
    found = [[hit["score"] for hit in of_query] for of_query in hits]
    np.testing.assert_allclose(found, highest, rtol=1e-5)
    np.save(folder / "00001.columns.npy", parts[1] + encoder.width)
    damaged = samestep("search", run, folder, corpus)
    assert (damaged.code, "columns beyond" in damaged.message) == (1, True)


def test_negatives_are_mined_by_dot_products(
    run: Path, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    output = tmp_path / "hard.jsonl"
    options = ("--split", "test", "--negatives", 3, "--range", "0-20", "--scores")
    assert samestep("mine", run, collection, "--output", output, *options).code == 0
    encoder = SentenceEncoder(str(run))
    rows = lines(output)
    assert len(rows) == 12
    for row in rows[:3]:
        positives = row["positive"]
        passages = [positives] if isinstance(positives, str) else list(positives)
        passages += row["negatives"]
        query = encoder(encoder.for_role("query", [row["query"]]))
        expected = encoder(encoder.for_role("document", passages)) @ query[0]
        np.testing.assert_allclose(row["scores"], expected, rtol=1e-4)


def test_a_custom_loop_tells_the_objective_its_steps(file: Path, tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'run'}", "training.steps=3", *SHORT]
    experiment = load_experiment(file, settings)
    with library.open_parts(experiment) as parts:
        taken = [parts.batches.objective.step for _ in parts.batches]
    assert taken == [0, 1, 2]


def test_what_sparse_embeddings_are_not_is_named(
    run: Path, file: Path, tmp_path: Path, samestep: Samestep
) -> None:
    train = ("train", file, f"output={tmp_path / 'new'}", "training.steps=1", *SHORT)
    dense = ["objective={kind: contrastive, negatives: 1, query_length: 16, passage_length: 20}"]
    assert samestep(*train, f"init_from={run}", *dense).code == 0
    # Pooling and similarity are those of dense embeddings, as nothing else is set.
    settings = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["objective"]
    names = ("pool", "normalize", "similarity", "max_length", "prompts")
    assert [settings[name] for name in names[:4]] == [None, None, None, 24]
    again = ("train", file, f"output={tmp_path / 'again'}", f"init_from={tmp_path / 'new'}")
    refused = samestep(*again)
    assert refused.code == 2
    assert "has no head that predicts tokens (its head: embedding)" in refused.message
    model = f"model={json.dumps({**STUDENT, 'head': 'embedding'})}"
    refused = samestep("train", file, f"output={tmp_path / 'other'}", model)
    assert (refused.code, "set model.head=language_model" in refused.message) == (2, True)
    pool = samestep("train", file, f"output={tmp_path / 'other'}", "objective.pool=mean")
    assert (pool.code, "objective.pool" in pool.message) == (2, True)


@pytest.mark.long
def test_an_export_is_a_sparse_encoder(
    run: Path,
    collection: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert samestep("export", run, "hf").code == 0
    assert samestep("export", "hf", "again").code == 0
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.evaluation import (
        SparseInformationRetrievalEvaluator,
    )

    ours = SentenceEncoder(str(run))
    for name in ("hf", "again"):
        theirs = SparseEncoder(name, device="cpu")
        assert (theirs.max_seq_length, theirs.similarity_fn_name) == (24, "dot")
        read = SentenceEncoder(name)
        assert read.pooling == ours.pooling
        assert read.width == ours.width == 600
        encoded = {"query": theirs.encode_query(TEXTS), "document": theirs.encode_document(TEXTS)}
        for role, vectors in encoded.items():
            for encoder in (ours, read):
                found = encoder(encoder.for_role(role, TEXTS))  # type: ignore[arg-type]
                np.testing.assert_allclose(found, vectors.to_dense(), atol=2e-6)
    # A folder that sentence-transformers has saved is read as well, and exported again.
    theirs.save("saved")
    assert samestep("export", "saved", "exported").code == 0
    for name in ("saved", "exported"):
        np.testing.assert_allclose(
            SentenceEncoder(name)(TEXTS), theirs.encode(TEXTS).to_dense(), atol=2e-6
        )

    documents = {row["_id"]: row["text"] for row in lines(collection / "corpus.jsonl")}
    queries = {row["_id"]: row["text"] for row in lines(collection / "queries.jsonl")}
    relevant: dict[str, set[str]] = {}
    for line in (collection / "qrels/test.tsv").read_text().splitlines():
        query, document, _ = line.split("\t")
        relevant.setdefault(query, set()).add(document)
    evaluator = SparseInformationRetrievalEvaluator(queries, documents, relevant, name="set")
    expected = evaluator(theirs)
    found = scores(samestep, Path("hf"), collection, "--measures", "mrr@10", "recall@10")
    assert found["mrr@10"] == pytest.approx(expected["set_dot_mrr@10"], abs=1e-6)
    assert found["recall@10"] == pytest.approx(expected["set_dot_recall@10"], abs=1e-6)

    card = Path("hf/README.md").read_text()
    for row in ("- sparse-encoder\n- splade\n", "| pooling | SPLADE |", "sentence-transformers\n"):
        assert row in card
    assert "| accuracy |" in card
    assert "| pooling | SPLADE |" in Path("again/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_regularizer_is_of_the_whole_batch_at_any_world_size(
    strategy: str, file: Path, tmp_path: Path
) -> None:
    """Its weights rise in the first four steps; three processes go on after the fourth."""
    tree = yaml.safe_load(file.read_text())
    del tree["init_from"]
    tree["model"] = {**STUDENT, "head": "language_model"}
    tree["objective"] |= {"flops_query": 3.0, "flops_passage": 2.0}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
    name = str(tmp_path / "file.yaml")
    settings = ["training.evaluate_every=null", "checkpoint.every=4", "training.steps=8"]
    alone = [*settings, "strategy=single", f"output={tmp_path / 'one'}"]
    (one,) = run_ranks(1, run_once, name, alone)
    shared = [*settings, f"strategy={strategy}", f"output={tmp_path / 'run'}"]
    two = run_ranks(2, run_once, name, [*shared, "training.micro_batch_size=4"])[0]
    np.testing.assert_allclose(two, one, rtol=1e-5)
    three = run_ranks(3, run_once, name, [*shared, "training.micro_batch_size=3"], 4)[0]
    np.testing.assert_allclose(three, one[4:], rtol=1e-5)
    without = [*alone[:-1], f"output={tmp_path / 'none'}", "objective.flops_query=0"]
    (other,) = run_ranks(1, run_once, name, without)
    assert np.abs(np.array(other) - one).max() > 1e-3
