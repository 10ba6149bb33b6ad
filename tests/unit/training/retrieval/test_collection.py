"""Folders in BEIR's layout, and what is wrong with some."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_pipeline.sources.beir import judged
from samestep.errors import DataError
from trainer.training.retrieval.collection import Collection

DOCUMENTS = [
    {"_id": "b", "title": "Heat", "text": "conduction"},
    {"_id": "a", "text": "flow"},
    {"_id": "c", "text": ""},
]
QUERIES = [{"_id": "1", "text": "warm"}, {"_id": "2", "text": "air"}, {"_id": "3", "text": "x"}]
JUDGMENTS = ["1\tb\t2", "1\ta\t0", "2\tb\t0"]


def written(folder: Path, documents=DOCUMENTS, queries=QUERIES, judgments=JUDGMENTS) -> Path:
    (folder / "qrels").mkdir()
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = ["query-id\tcorpus-id\tscore", *judgments]
    (folder / "qrels/test.tsv").write_text("\n".join(lines))
    return folder


def test_documents_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    found = Collection.read(written(tmp_path), "test")
    assert list(found.documents.items()) == [("a", "flow"), ("b", "Heat conduction"), ("c", "")]
    assert found.queries == {"1": "warm"}
    assert found.judgments["1"] == {"b": 2, "a": 0}
    assert (found.unjudged, found.empty) == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": [*DOCUMENTS, DOCUMENTS[0]]}, r"corpus.jsonl:4: duplicate id: 'b'"),
        ({"documents": [{"_id": 1.5, "text": "x"}]}, r"corpus.jsonl:1: column '_id' is neither"),
        ({"documents": [{"text": "x"}]}, r"corpus.jsonl:1: no column '_id'"),
        ({"documents": [{"_id": "a", "title": 1, "text": "x"}]}, r"corpus.jsonl:1: column 'title'"),
        ({"documents": [{"_id": "a", "text": "\ud83d"}]}, r"corpus.jsonl:1: invalid Unicode"),
        ({"queries": []}, r"queries.jsonl:1: empty file"),
        ({"queries": [{"_id": "1", "text": " "}, QUERIES[1]]}, r"test.tsv:2: empty query"),
        ({"judgments": ["1\ta\t1", "1\tz\t1"]}, r"test.tsv:3: corpus-id names no document: 'z'"),
        ({"judgments": ["9\ta\t1"]}, r"test.tsv:2: query-id names no query: '9'"),
        ({"judgments": ["1\ta\t1", "1\ta\t0"]}, r"test.tsv:3: judged before, .* score: 'a'"),
        ({"judgments": ["1 a 1"]}, r"test.tsv:2: not query-id, .* between: '1 a 1'"),
        ({"judgments": ["1\ta\thigh"]}, r"test.tsv:2: the score is not a whole number: 'high'"),
        ({"judgments": ["1\ta\t" + "9" * 400]}, r"test.tsv:2: the score is not a whole number"),
        ({"judgments": ["1\ta\t0"]}, r"no relevant document for any query"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, list[str]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        Collection.read(written(tmp_path, **change), "test")


def test_another_folder_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no corpus.jsonl. Name a folder in BEIR's layout"):
        Collection.read(tmp_path, "test")
    with pytest.raises(DataError, match=r"has no qrels/dev.tsv. .* there: test"):
        Collection.read(written(tmp_path), "dev")


def test_spellings_of_published_folders(tmp_path: Path) -> None:
    documents = [{"_id": 1, "title": None, "text": "a fox"}, {"_id": "2", "text": "a dog"}]
    queries = [{"_id": 7, "text": "who ", "title": "no"}, {"_id": "8", "text": ""}]
    folder = written(tmp_path, documents, queries, ["7\t1\t+1", "", "7\t2\t-1.0", " 7\t1 \t1\r"])
    file = folder / "qrels/test.tsv"
    content = file.read_bytes().replace(b"query-id\t", b"\xef\xbb\xbfquery-id \t")
    with gzip.open(f"{file}.gz", "wb") as packed:
        packed.write(content)
    file.unlink()
    found = Collection.read(folder, "test")
    assert found.documents == {"1": "a fox", "2": "a dog"}
    assert found.queries == {"7": "who"}
    assert found.judgments == {"7": {"1": 1, "2": -1}}
    assert found.unjudged == 1
    # A folder to evaluate on is a folder to train on.
    files = (f"{file}.gz", str(folder / "queries.jsonl"))
    (row,) = judged(files, 1)
    assert (row.line, row.problem) == (2, None)
    assert json.loads(row.data) == {"query": "who", "positive": ["1"], "negatives": ["2"]}
