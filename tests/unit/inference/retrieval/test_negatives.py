"""Which passages become negatives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import ConfigError, DataError
from trainer.inference.retrieval import vectors as stored
from trainer.inference.retrieval.negatives import Choice, Miner
from trainer.inference.retrieval.pairs import Pairs
from trainer.inference.retrieval.vectors import Vectors

SCORES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])


def test_ranges_and_margins() -> None:
    def places(*arguments: Any, positive: float = 0.8, **settings: Any) -> list[int]:
        return Choice(*arguments, **settings)("q", SCORES, positive).tolist()

    assert places(2, 0, 5) == [0, 1]
    assert places(2, 3, 5) == [3, 4]
    assert places(3, 5, 100) == [5, 6]
    assert places(2, 0, 5, margin=0) == [1, 2]
    assert places(2, 0, 5, margin=0.15) == [3, 4]
    # Ranks come first: of the ranks 2 to 4, those below 0.65.
    assert places(2, 1, 4, margin=0.15) == [3]
    assert places(2, 0, 5, relative_margin=0.05) == [2, 3]
    assert places(2, 0, 7, margin=0.1, relative_margin=0.5) == [5, 6]
    # 5 % below a negative similarity is further away from 0.
    assert Choice(1, 0, 2, relative_margin=0.05)("q", -SCORES[::-1], -0.31).tolist() == [1]


def test_random_ones_are_a_hash_of_seed_and_query() -> None:
    def places(query: str, seed: int) -> list[int]:
        choice = Choice(8, 10, 90, how="random", seed=seed)
        return choice(query, np.zeros(100), 0.0).tolist()

    chosen = {tuple(places(f"q{query}", seed)) for query in range(5) for seed in range(2)}
    assert len(chosen) == 10
    assert places("q1", 1) == places("q1", 1) == sorted(set(places("q1", 1)))
    assert {place for query in range(200) for place in places(str(query), 0)} == {*range(10, 90)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negatives": 0}, "--negatives must be"),
        ({"last": 5}, "--range 0-5 has 5 passages, and --negatives is 8"),
        ({"skipped": 9, "last": 5}, "--range 9-5 has 0"),
        ({"margin": -1.0}, "--margin must be"),
        ({"margin": float("nan")}, "--margin must be"),
        ({"relative_margin": 1.0}, "--relative-margin must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Choice(**{"negatives": 8, "skipped": 0, "last": 20, **settings})


class Encoder:
    """Gives each text a vector of small whole numbers, so that many products are equal."""

    placed = torch.device("cpu")

    def for_role(self, role: str, texts: list[str]) -> list[str]:
        return texts

    def __call__(self, texts: list[str], batch_tokens: int) -> torch.Tensor:
        seeds = [sum(map(ord, text)) for text in texts]
        return torch.tensor([[seed % 3 - 1, seed % 5 - 2, 1] for seed in seeds]).float()


def written(file: Path, rows: list[dict[str, object]]) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_negatives_do_not_depend_on_what_is_computed_at_a_time(
    similarity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": f"q{n % 7}", "positive": f"text {n % 11}"} for n in range(20)]
    rows += [{"query": "text 0", "positive": ["text 3", f"other {n}"]} for n in range(30)]
    pairs = Pairs.of_rows(written(tmp_path / "rows.jsonl", rows), None)
    encoder: Any = Encoder()
    found = []
    for part, block in ((100, 16384), (7, 5)):
        monkeypatch.setattr(stored, "_ROWS", block)
        vectors = Vectors.begin(
            tmp_path / str(part),
            pairs.names,
            part=part,
            width=3,
            number="float32",
            similarity=similarity,
            made_of={},
        )
        for index in range(vectors.parts):
            texts = pairs.texts[index * part :][:part]
            vectors.write(index, encoder(texts, 1))
        miner = Miner(pairs, vectors, encoder, None, Choice(4, 2, 30))
        found += [miner(pairs.rows), miner(pairs.rows[:9]) + miner(pairs.rows[9:])]
    assert found[0] == found[1] == found[2] == found[3]
    for row, negatives, scores in found[0]:
        assert not {*negatives} & pairs.positives()[row.query]
        assert pairs.number(row.query) not in negatives
        assert len(negatives) == 4
        assert len(scores) == len(row.positives) + 4
        assert scores[len(row.positives) :] == sorted(scores[len(row.positives) :], reverse=True)


def test_rows_name_passages_by_id_or_text(tmp_path: Path) -> None:
    corpus = [{"_id": f"d{n}", "title": "T", "text": f"{n // 2}"} for n in range(6)]
    passages = written(tmp_path / "corpus.jsonl", corpus)
    rows = written(
        tmp_path / "rows.jsonl",
        [{"_id": 7, "query": "a", "positive": ["d1", "T 2"]}, {"query": "b", "positive": "d0"}],
    )
    pairs = Pairs.of_rows(rows, passages)
    assert (pairs.names, pairs.texts) == (["d0", "d2", "d4"], ["T 0", "T 1", "T 2"])
    assert [(row.name, row.positives) for row in pairs.rows] == [("7", (0, 2)), ("2", (0,))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": " ", "positive": "d0"}, "jsonl:1 has an empty query"),
        ({"query": "a", "positive": []}, "jsonl:1 has an empty positive"),
        ({"query": "a", "positive": ["d0", ""]}, "jsonl:1 has an empty positive"),
        ({"query": "a"}, "jsonl:1: positive is missing"),
        ({"query": "a", "positive": "d9"}, "jsonl:1 has the positive 'd9', which is neither"),
        ({"query": "a", "positive": 3}, "jsonl:1: positive is 3"),
    ],
)
def test_rows_without_a_positive_are_named(
    row: dict[str, object], message: str, tmp_path: Path
) -> None:
    passages = written(tmp_path / "corpus.jsonl", [{"_id": "d0", "text": "x"}])
    with pytest.raises(DataError, match=message):
        Pairs.of_rows(written(tmp_path / "rows.jsonl", [row]), passages)


def test_documents_without_text_are_neither_positives_nor_negatives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/train.tsv").write_text("q1\td1\t1\nq1\td2\t1\nq1\td3\t0\nq2\td2\t1\n")
    written(tmp_path / "queries.jsonl", [{"_id": f"q{n}", "text": "?"} for n in (1, 2)])
    texts = {"d1": "a", "d2": "", "d3": "b"}
    written(tmp_path / "corpus.jsonl", [{"_id": n, "text": text} for n, text in texts.items()])
    pairs = Pairs.of_collection(tmp_path, "train")
    assert pairs.names == ["d1", "d3"]
    assert [(row.name, row.positives) for row in pairs.rows] == [("q1", (0,))]
    assert "1 documents have no text" in caplog.text
    assert "without a positive that has a text; left out: q2" in caplog.text
