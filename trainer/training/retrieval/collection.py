"""Documents, queries and judgments in the layout of BEIR (Thakur et al. 2021).

corpus.jsonl       {"_id": "d1", "title": "optional", "text": "..."}
queries.jsonl      {"_id": "q1", "text": "..."}
qrels/test.tsv     query-id <TAB> corpus-id <TAB> score, after a line with these three names

The JSON Lines may be compressed (.gz, .zst).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from data_pipeline.sources.files import read_records
from data_pipeline.sources.kinds.jsonl import lines
from samestep.errors import DataError
from samestep.stored_json import JsonError, parse_json
from samestep.untrusted import inside, read_regular
from trainer.training.retrieval.measures import scores

logger = logging.getLogger(__name__)

_HEADER = ("query-id", "corpus-id", "score")
_MOST_RELEVANT = 2**31
_ENDINGS = ("", ".gz", ".zst")


class _Document(TypedDict):
    _id: str
    text: str
    title: NotRequired[str]


@dataclass(frozen=True)
class Collection:
    """What a retriever is scored on.

    Attributes:
        documents: texts by id, in ascending order of the ids; a title comes first.
        queries: texts by id, of queries with a relevant document.
        judgments: relevance by query and document.
        unjudged: number of queries that are left out, as no document is relevant to them.
        empty: number of documents without text, which published collections have.
    """

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    judgments: Mapping[str, Mapping[str, int]]
    unjudged: int
    empty: int

    @classmethod
    def read(cls, folder: Path, split: str) -> Collection:
        """Reads a folder.

        Args:
            split: name of the file of judgments, such as test.

        Raises:
            DataError: a file is missing or damaged, an id comes twice, a query is empty,
                or a judgment names no document or query.
        """
        corpus, asked, file = files_of(folder, split)
        documents, queries = _texts(corpus), _texts(asked)
        if without := [name for name, text in queries.items() if not text]:
            raise DataError(
                f"the query {without[0]!r} of {folder} has an empty text. Remove it, and its "
                "judgments."
            )
        judgments: dict[str, dict[str, int]] = {}
        for number, query, document, relevance in _judgments(file):
            for name, known, what in ((query, queries, "query"), (document, documents, "document")):
                if name not in known:
                    raise DataError(
                        f"{file}:{number} names the {what} {name!r}, which {folder} does not have. "
                        "Remove the line, or use the judgments that belong to it."
                    )
            # The same judgment twice is harmless; of two different ones, none could be chosen.
            if judgments.setdefault(query, {}).setdefault(document, relevance) != relevance:
                raise DataError(
                    f"{file}:{number} judges document {document!r} for query {query!r} a second "
                    "time, and differently. Remove one of the lines."
                )
        # Without a relevant document, ndcg and recall would divide by 0.
        judged = {query for query, found in judgments.items() if max(found.values()) > 0}
        if not judged:
            raise DataError(f"{file} has no relevant document for any query. Use another split.")
        return cls(
            dict(sorted(documents.items())),
            {query: text for query, text in queries.items() if query in judged},
            judgments,
            len(queries) - len(judged),
            sum(not text for text in documents.values()),
        )

    def scores(
        self, measures: Sequence[str], rankings: Sequence[Sequence[str]]
    ) -> dict[str, float]:
        """The mean of each measure over the queries; see `measures.scores`."""
        judgments = [self.judgments[query] for query in self.queries]
        found = scores(measures, rankings, judgments)
        return {name: float(values.mean()) for name, values in found.items()}

    def log_gaps(self) -> None:
        """Logs how many queries are left out, and how many documents have no text."""
        if self.unjudged:
            logger.info("%d queries have no relevant document; left out", self.unjudged)
        if self.empty:
            logger.warning("%d documents have no text", self.empty)


def files_of(folder: Path, split: str) -> tuple[Path, Path, Path]:
    """The files of documents, queries and judgments.

    Raises:
        DataError: one is missing.
    """
    texts = _one_of(folder, "corpus.jsonl"), _one_of(folder, "queries.jsonl")
    judgments = inside(folder, f"qrels/{split}.tsv")
    if not judgments.is_file():
        there = ", ".join(sorted(path.stem for path in folder.glob("qrels/*.tsv"))) or "none"
        raise DataError(
            f"{folder} has no qrels/{split}.tsv. Name the split of another file; there: {there}."
        )
    return (*texts, judgments)


def _one_of(folder: Path, name: str) -> Path:
    files = [inside(folder, name + ending) for ending in _ENDINGS]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise DataError(
            f"{folder} has no {name}. Name a folder in BEIR's layout: corpus.jsonl, "
            "queries.jsonl and qrels/test.tsv."
        )
    return found


def _texts(file: Path) -> dict[str, str]:
    """The texts of a file by id."""
    texts: dict[str, str] = {}
    for record in read_records((str(file),), lines):
        place = f"{file}:{record.line}"
        if record.problem:
            raise DataError(f"{place}: {record.problem}. Copy or download the file again.")
        try:
            row = parse_json(record.data, _Document)
        except JsonError as error:
            raise DataError(f"{place}: {error}. Correct the line.") from error
        text = f"{row.get('title', '')} {row['text']}".strip()
        if row["_id"] in texts:
            raise DataError(
                f"{place} has the id {row['_id']!r}, as an earlier line has. Give each its own."
            )
        texts[row["_id"]] = text
    return texts


def _judgments(file: Path) -> Iterator[tuple[int, str, str, int]]:
    try:
        content = read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {file}: {error}. It lists query-id, corpus-id and score of each judgment."
        ) from error
    for number, line in enumerate(content.split("\n"), 1):
        fields = tuple(field.strip() for field in line.split("\t"))
        # Blank lines, also the empty one after the last line end, and the header.
        if fields in ((), ("",)) or (number == 1 and fields == _HEADER):
            continue
        try:
            query, document, relevance = fields
            score = int(relevance)
            if abs(score) > _MOST_RELEVANT:
                raise ValueError
            yield number, query, document, score
        except ValueError:
            raise DataError(
                f"{file}:{number} is {line[:80]!r}. Write query-id, corpus-id and a whole number, "
                "with tabs between."
            ) from None
