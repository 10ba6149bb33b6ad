"""`samestep mine`: hard negatives, the same after a kill and with other numbers of processes."""

from __future__ import annotations

import json
import os
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
    assert "language_model head" in samestep(*mine, "--teacher", finished_run).message
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
