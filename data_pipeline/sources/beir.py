"""Folders in the layout of BEIR (Thakur et al. 2021), read as rows of retrieval.

corpus.jsonl       {"_id": "d1", "title": "optional", "text": "..."}
queries.jsonl      {"_id": "q1", "text": "..."}
qrels/train.tsv    query-id <TAB> corpus-id <TAB> score, after a line with these three names

All may be compressed (.gz, .zst).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.sources import UTF8, BadRecord, Record
from data_pipeline.sources.columns import brief, label_text, row_of, text, whole
from data_pipeline.sources.files import read_records
from data_pipeline.sources.kinds.jsonl import encoded, lines
from data_pipeline.sources.table import Found
from samestep import storage
from samestep.errors import ConfigError
from samestep.storage import objects

_HEADER = b"query-id\tcorpus-id\tscore"


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


def judged(files: tuple[str, ...], splits: int) -> Iterator[Record]:
    """Yields a row for each judged query, with the ids of its documents.

    The line of a row is the line of the query's first judgment. Bad lines are records with a
    `problem`.

    Args:
        files: the judgments of each split first, and the queries last.
        splits: number of splits.
    """
    texts: dict[str, str] = {}
    for record in read_records(files[-1:], lines):
        try:
            row = row_of(record.content())
            name = label_text(row.get("_id"))
            if name in texts:
                raise BadRecord(f"duplicate id: {name!r}")
            texts[name] = text(row, "text")
        except BadRecord as error:
            yield Record(len(files) - 1, record.line, b"", 0.0, str(error))
    # Judgments of a query need not follow each other, so a split is read whole before its rows.
    for split in range(splits):
        first: dict[str, int] = {}
        scores: dict[str, dict[str, int]] = {}
        for record in read_records(files[split : split + 1], lines):
            if record.line == 1 and record.data.strip() == _HEADER:
                continue
            try:
                query, document, score = _judgment(record.content())
                if query not in texts:
                    raise BadRecord(f"query-id names no query: {query!r}")
                first.setdefault(query, record.line)
                if scores.setdefault(query, {}).setdefault(document, score) != score:
                    raise BadRecord(f"judged before, with another score: {document!r}")
            except BadRecord as error:
                yield Record(split, record.line, b"", 0.0, str(error))
        for number, (query, found) in enumerate(scores.items(), start=1):
            positives = [name for name, score in found.items() if score > 0]
            negatives = [name for name, score in found.items() if score <= 0]
            row = {"query": texts[query], "positive": positives, "negatives": negatives}
            read = (split + number / len(scores)) / splits
            yield Record.of(split, first[query], encoded(row), read)


def _judgment(line: bytes) -> tuple[str, str, int]:
    try:
        query, document, relevance = (field.strip() for field in line.decode().split("\t"))
    except ValueError:
        raise BadRecord(
            f"not query-id, corpus-id and score with tabs between: {brief(line)}"
        ) from None
    score = whole(relevance.removeprefix("-"))
    if score is None:
        raise BadRecord(f"the score is not a whole number: {relevance!r}")
    return query, document, -score if relevance.startswith("-") else score
