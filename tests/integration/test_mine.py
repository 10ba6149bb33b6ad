"""`samestep mine`: hard negatives, the same after a kill and with other numbers of processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import Samestep, Start
from tests.waiting import until

WORDS = ("class", "module", "object", "value", "string", "number", "method", "name")


def texts(count: int) -> list[str]:
    """Different texts with many words in common."""
    return [
        " ".join(WORDS[(n >> shift) % 8] for shift in (0, 3, 6, 9)) + f" {n % 10}"
        for n in range(count)
    ]


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    found = [{"_id": f"d{n}", "text": text} for n, text in enumerate(texts(60))]
    return written(tmp_path / "corpus.jsonl", found)


def test_rows_have_texts_ids_and_scores(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    queries = [{"query": f"what is {WORDS[n]}", "positive": f"d{n}"} for n in range(8)]
    queries.append({"_id": "two", "query": "a name", "positive": ["d9", texts(60)[12]]})
    file = written(tmp_path / "rows.jsonl", queries)
    output = tmp_path / "mined.jsonl"
    mine = ("mine", finished_run, file, "--passages", corpus, "--range", "0-20", "--negatives", 3)
    assert samestep(*mine, "--output", output, "--scores").code == 0
    found = rows_of(output)
    assert [row["query"] for row in found] == [row["query"] for row in queries]
    assert [row["query_id"] for row in found] == [*map(str, range(1, 9)), "two"]
    assert found[8]["positive_id"] == ["d9", "d12"]
    assert found[8]["positive"] == [texts(60)[9], texts(60)[12]]
    for row in found:
        assert row["negatives"] == [texts(60)[int(name[1:])] for name in row["negative_ids"]]
        assert len(set(row["negative_ids"]) - {*row["positive_id"], row["positive_id"][0]}) == 3
        negatives = row["scores"][-3:]
        assert len(row["scores"]) == 3 + (row["query_id"] == "two") + 1
        assert negatives == sorted(negatives, reverse=True)
    assert [file.name for file in tmp_path.glob("mined*")] == ["mined.jsonl"]
    assert "exists already" in samestep(*mine, "--output", output).message


def test_queries_with_fewer_negatives_are_listed(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    # The positive of the second query is the text itself, and few others are as near.
    queries = [{"query": "?", "positive": "d1"}, {"query": texts(60)[7], "positive": "d7"}]
    file = written(tmp_path / "rows.jsonl", queries)
    output = tmp_path / "mined.jsonl"
    mine = ("mine", finished_run, file, "--passages", corpus, "--range", "55-100", "--output")
    message = samestep(*mine, output).message
    assert "2 queries have fewer than 8 negatives (1: 4, 2: 4). Widen --range" in message
    vectors = output.with_name("mined.jsonl.work") / "passages/00000.npy"
    before = vectors.stat()
    # Other settings need no new vectors.
    assert "1: 7, 2: 7" in samestep(*mine[:-2], "52-100", "--output", output).message
    assert vectors.stat().st_mtime_ns == before.st_mtime_ns
    assert "(1: 4, 2: 4): kept" in samestep(*mine, output, "--fewer", "keep").err
    assert [len(row["negatives"]) for row in rows_of(output)] == [4, 4]
    output.unlink()
    assert "(1: 4, 2: 4): left out" in samestep(*mine, output, "--fewer", "skip").err
    assert output.read_bytes() == b""


def test_what_does_not_fit_is_named(
    finished_run: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = written(tmp_path / "rows.jsonl", [{"query": "?", "positive": "d1"}])
    output = tmp_path / "mined.jsonl"
    mine = ("mine", finished_run, file, "--passages", corpus, "--output", output)
    assert "--split is for a folder" in samestep(*mine, "--split", "dev").message
    assert "is a folder with its own" in samestep("mine", finished_run, tmp_path, *mine[3:]).message
    assert "--seed needs --choose random" in samestep(*mine, "--seed", 1).message
    assert "--range must be A-B" in samestep(*mine, "--range", "30").message
    assert "has 3 passages" in samestep(*mine, "--range", "0-3").message
    assert "has the head language_model" in samestep(*mine, "--teacher", finished_run).message
    assert not output.with_name("mined.jsonl.work").exists()
    mine += ("--range", "50-100", "--negatives", 20)
    assert "fewer than 20" in samestep(*mine).message
    older = next((finished_run / "checkpoints").glob("*8"))
    assert "begun with different model" in samestep("mine", older, *mine[2:]).message
    (part,) = output.with_name("mined.jsonl.work").glob("negatives-*/00000.jsonl")
    part.write_text('{"query_id": 1}\n')
    assert "00000.jsonl is damaged" in samestep(*mine).message
    part.unlink()
    (output.with_name("mined.jsonl.work") / "passages/00000.npy").write_bytes(b"x")
    assert "cannot read" in samestep(*mine).message


@pytest.mark.long
def test_killed_and_with_other_processes_it_writes_the_same(
    finished_run: Path, tmp_path: Path, start: Start
) -> None:
    passages = [{"_id": f"d{n}", "text": text} for n, text in enumerate(texts(4200))]
    corpus = written(tmp_path / "corpus.jsonl", passages)
    rows = [
        {"query": f"the {text}", "positive": f"d{7 * n % 4000}"}
        for n, text in enumerate(texts(2100))
    ]
    file = written(tmp_path / "rows.jsonl", rows)
    options = ("--scores", "--choose", "random", "--range", "10-60")
    mine = ("mine", finished_run, file, "--passages", corpus, *options, "--output")
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert start(*mine, one).wait(200).code == 0
    for seen, processes in (("passages/00000.npy", 2), ("negatives-*/0000*.jsonl", 1)):
        killed = start(*mine, two, "--processes", processes)
        until(lambda: [*two.with_name("two.jsonl.work").glob(seen)])  # noqa: B023
        os.killpg(killed.popen.pid, signal.SIGKILL)
        killed.popen.wait()
        assert not two.exists()
    resumed = start(*mine, two, "--processes", 3).wait(200)
    assert resumed.code == 0
    assert "are there already" in resumed.err
    assert one.read_bytes() == two.read_bytes()
    assert not two.with_name("two.jsonl.work").exists()


@pytest.fixture
def encoder(dataset_folder: Path, tmp_path: Path) -> Path:
    """A random BERT as a folder of sentence-transformers."""
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(dataset_folder / "tokenizer", folder)
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=600, intermediate_size=64, initializer_range=0.5, **settings
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    types = [{"path": p, "type": f"sentence_transformers.models.{kind}"} for p, kind in modules]
    (folder / "modules.json").write_text(
        json.dumps([{"idx": n, "name": str(n), **each} for n, each in enumerate(types)])
    )
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--range", "5-40"), {"range_min": 5, "range_max": 40}),
        (("--range", "0-150", "--margin", 0.03), {"range_max": 150, "absolute_margin": 0.03}),
        (
            ("--range", "0-150", "--relative-margin", 0.05),
            {"range_max": 150, "relative_margin": 0.05},
        ),
    ],
)
def test_negatives_are_those_of_sentence_transformers(
    options: tuple[object, ...],
    settings: dict[str, Any],
    encoder: Path,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    datasets = pytest.importorskip("datasets")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    passages = texts(200)
    # Each of 30 queries in two rows, so that each has two positives.
    pairs = [(f"what is {WORDS[n % 30 % 8]} {n % 30}", passages[7 * n % 200]) for n in range(60)]
    corpus = written(
        tmp_path / "corpus.jsonl", [{"_id": f"d{n}", "text": t} for n, t in enumerate(passages)]
    )
    rows = [{"query": query, "positive": positive} for query, positive in pairs]
    file, output = written(tmp_path / "rows.jsonl", rows), tmp_path / "mined.jsonl"
    mine = ("mine", encoder, file, "--passages", corpus, "--negatives", 4, "--output", output)
    assert samestep(*mine, *options, "--scores", "--fewer", "keep").code == 0

    theirs = sentence_transformers.util.mine_hard_negatives(
        datasets.Dataset.from_list(rows),
        sentence_transformers.SentenceTransformer(str(encoder), device="cpu"),
        corpus=passages,
        num_negatives=4,
        output_format="labeled-list",
        output_scores=True,
        verbose=False,
        **settings,
    )
    expected = {(row["query"], row["positive"][0]): row for row in theirs}
    found = {(row["query"], row["positive"]): row for row in rows_of(output) if row["negatives"]}
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for key, row in found.items():
        assert row["scores"] == pytest.approx(expected[key]["scores"], abs=2e-6)
        assert [row["positive"], *row["negatives"]] == expected[key]["positive"]


@pytest.mark.long
def test_scores_of_a_teacher_are_those_of_a_cross_encoder(
    encoder: Path, corpus: Path, tmp_path: Path, samestep: Samestep
) -> None:
    import torch
    import transformers

    sentence_transformers = pytest.importorskip("sentence_transformers")
    teacher = tmp_path / "teacher"
    shutil.copytree(encoder, teacher, ignore=shutil.ignore_patterns("modules.json", "1_Pooling"))
    config = transformers.AutoConfig.from_pretrained(teacher, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(teacher)
    # Theirs would ignore the types of tokens otherwise.
    tokenizer = json.loads((teacher / "tokenizer_config.json").read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer |= {"model_input_names": names}
    (teacher / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    queries = [{"query": f"a {word}", "positive": f"d{n}"} for n, word in enumerate(WORDS)]
    file, output = written(tmp_path / "rows.jsonl", queries), tmp_path / "mined.jsonl"
    mine = ("mine", encoder, file, "--passages", corpus, "--range", "0-9", "--output", output)
    assert samestep(*mine, "--teacher", teacher).code == 0
    theirs = sentence_transformers.CrossEncoder(
        str(teacher), device="cpu", activation_fn=torch.nn.Identity()
    )
    for row in rows_of(output):
        read = [(row["query"], text) for text in (row["positive"], *row["negatives"])]
        assert row["scores"] == pytest.approx(theirs.predict(read).tolist(), abs=1e-5)
