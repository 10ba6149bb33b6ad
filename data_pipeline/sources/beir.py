"""Folders in the layout of BEIR (Thakur et al. 2021): to train on, as rows, and to evaluate on.

corpus.jsonl       {"_id": "d1", "title": "optional", "text": "..."}
queries.jsonl      {"_id": "q1", "text": "..."}
qrels/train.tsv    query-id <TAB> corpus-id <TAB> score, after a line with these three names

An id may be a whole number. All files may be compressed (.gz, .zst).
"""

from __future__ import annotations

import os
from collections.abc import Container, Generator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

from data_pipeline.sources import UTF8, BadRecord, Record, checked_text, decode_utf8
from data_pipeline.sources.columns import brief, column, label_text, row_of, text, whole
from data_pipeline.sources.files import read_records
from data_pipeline.sources.kinds.jsonl import encoded, lines, values
from data_pipeline.sources.table import Found
from samestep import storage
from samestep.errors import ConfigError
from samestep.storage import objects

T = TypeVar("T")
Reading: TypeAlias = Generator[Record, None, T]
"""Yields bad lines, as records with a `problem`, and returns the content of the others."""

_HEADER = ["query-id", "corpus-id", "score"]


@dataclass(frozen=True)
class Folder:
    """A folder with a corpus, queries and judgments (qrels).

    A query's positives are the documents with a score above 0; others that are judged are
    negatives.

    Attributes:
        path: the folder.
        split: the judgments to train on, "train" for qrels/train.tsv; None for a dataset that is
            only evaluated on.
        heldout: the judgments to hold out, such as "dev"; None: `heldout_fraction` of the queries.
    """

    path: str
    split: str | None = "train"
    heldout: str | None = None

    def __post_init__(self) -> None:
        if self.split == self.heldout:
            raise ConfigError(
                f"beir.split and beir.heldout are both {self.split!r}. Name judgments to train on, "
                "others to hold out, or both."
            )

    def find(self) -> Found:
        """Finds the judgments.

        Raises:
            ConfigError: a file is missing.
        """
        splits = [each for each in (self.split, self.heldout) if each is not None]
        files = tuple(self._one_of(f"qrels/{split}.tsv") for split in splits)
        # With "train" and "dev", the files of judgments are 0 and 1, and file 1 is held out.
        first_heldout = None if self.heldout is None else len(files) - 1
        return {
            "files": files,
            "first_heldout": first_heldout,
            "header": (),
            "parts": (),
            "encoding": UTF8,
        }

    def corpus(self) -> str:
        """Path of the documents."""
        return self._one_of("corpus.jsonl")

    def queries(self) -> str:
        """Path of the queries."""
        return self._one_of("queries.jsonl")

    def _one_of(self, name: str) -> str:
        base = f"{os.path.expanduser(self.path).rstrip('/')}/{name}"
        exists = objects.exists if storage.is_url(base) else os.path.isfile
        for ending in ("", ".gz", ".zst"):
            if exists(base + ending):
                return base + ending
        raise ConfigError(
            f"{storage.shown(self.path)} has no {name}. Name a folder in BEIR's layout: "
            "corpus.jsonl, queries.jsonl and qrels/train.tsv."
        )


class Judged(NamedTuple):
    """The judgments of a query.

    Attributes:
        line: of the first.
        scores: by document.
    """

    line: int
    scores: dict[str, int]


def judged(files: tuple[str, ...], splits: int) -> Iterator[Record]:
    """Yields a row for each judged query, with the ids of its documents.

    The line of a row is the line of the query's first judgment. Bad lines are records with a
    `problem`.

    Args:
        files: the judgments of each split first, and the queries last.
        splits: number of splits.
    """
    queries = yield from texts(files, len(files) - 1, has_title=False)
    # Judgments of a query need not follow each other, so a split is read whole before its rows.
    for split in range(splits):
        found = yield from judgments(files, split, queries)
        for number, (name, (line, scores)) in enumerate(found.items(), start=1):
            # TREC judges from 0 (not relevant) upward, and some collections mark spam by -1 or -2.
            positives = [document for document, score in scores.items() if score > 0]
            negatives = [document for document, score in scores.items() if score <= 0]
            row = {"query": queries[name], "positive": positives, "negatives": negatives}
            yield Record.of(split, line, encoded(row), (split + number / len(found)) / splits)


def texts(files: tuple[str, ...], index: int, has_title: bool) -> Reading[dict[str, str]]:
    """Reads the texts of a file by id.

    Args:
        index: of the file in `files`.
        has_title: whether a title is part of a text. Queries have none.
    """
    found: dict[str, str] = {}
    for record in read_records(files[index : index + 1], values):
        try:
            name, content = document(record.content(), has_title)
            if name in found:
                raise BadRecord(f"duplicate id: {name!r}")
            found[name] = content
        except BadRecord as error:
            yield Record(index, record.line, b"", 0.0, str(error))
    return found


def judgments(
    files: tuple[str, ...],
    index: int,
    queries: Container[str],
    documents: Container[str] | None = None,
) -> Reading[dict[str, Judged]]:
    """Reads the judgments of a file by query.

    Args:
        index: of the file in `files`.
        queries, documents: ids; None allows any document.
    """
    found: dict[str, Judged] = {}
    for record in read_records(files[index : index + 1], lines):
        try:
            line = decode_utf8(record.content())
            fields = [field.strip() for field in line.split("\t")]
            if record.line == 1 and fields == _HEADER:
                continue
            if len(fields) != len(_HEADER):
                reason = "not query-id, corpus-id and score with tabs between"
                raise BadRecord(f"{reason}: {brief(line)}")
            name, document, digits = fields
            # `int` would also take "1_000" and digits of other scripts.
            score = whole(digits[1:] if digits[:1] in ("-", "+") else digits)
            if score is None:
                raise BadRecord(f"the score is not a whole number: {brief(digits)}")
            if name not in queries:
                raise BadRecord(f"query-id names no query: {brief(name)}")
            if documents is not None and document not in documents:
                raise BadRecord(f"corpus-id names no document: {brief(document)}")
            score = -score if digits.startswith("-") else score
            scores = found.setdefault(name, Judged(record.line, {})).scores
            # The same judgment twice is harmless; of two different ones, none could be chosen.
            if scores.setdefault(document, score) != score:
                raise BadRecord(f"judged before, with another score: {brief(document)}")
        except BadRecord as error:
            yield Record(index, record.line, b"", 0.0, str(error))
    return found


def document(data: bytes, has_title: bool = True) -> tuple[str, str]:
    """Returns the id of a document and its text, which may be empty, with a title in front.

    Raises:
        BadRecord: one of them is missing or has another type.
    """
    row = row_of(data)
    name, title = column(row, "_id"), row.get("title") if has_title else None
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise BadRecord(f"column '_id' is neither text nor a whole number: {brief(name)}")
    if not isinstance(title or "", str):
        raise BadRecord("column 'title' is not text")
    content = f"{title or ''} {text(row, 'text')}".strip()
    return label_text(name), content and checked_text(content, "text")
