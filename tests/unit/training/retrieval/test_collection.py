"""Folders in BEIR's layout, and what is wrong with some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        ({"documents": [*DOCUMENTS, DOCUMENTS[0]]}, r"corpus.jsonl:4 has the id 'b'"),
        ({"documents": [{"_id": 1, "text": "x"}]}, r"corpus.jsonl:1: _id is 1, not a text"),
        ({"queries": [*QUERIES, {"_id": "4", "text": " "}]}, r"the query '4' .* empty text"),
        ({"judgments": ["1\tz\t1"]}, r"test.tsv:2 names the document 'z'"),
        ({"judgments": ["9\ta\t1"]}, r"test.tsv:2 names the query '9'"),
        ({"judgments": ["1\ta\t1", "1\ta\t0"]}, r"test.tsv:3 judges document 'a' .* second time"),
        ({"judgments": ["1 a 1"]}, r"test.tsv:2 is '1 a 1'"),
        ({"judgments": ["1\ta\thigh"]}, r"a whole number"),
        ({"judgments": ["1\ta\t" + "9" * 400]}, r"a whole number"),
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
