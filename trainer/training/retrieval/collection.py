"""Folders in the layout of BEIR, to score retrievers on; see `data_pipeline.sources.beir`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data_pipeline.sources import beir
from samestep.errors import ConfigError, DataError
from trainer.training.retrieval.measures import scores

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
            DataError: a file is missing or damaged, an id comes twice, a query with a relevant
                document is empty, or a judgment names no document or query.
        """
        files = tuple(map(str, files_of(folder, split)))
        documents = _complete(files, beir.texts(files, 0, has_title=True))
        queries = _complete(files, beir.texts(files, 1, has_title=False))
        judged = _complete(files, beir.judgments(files, 2, queries, documents))
        # Without a relevant document, ndcg and recall would divide by 0.
        relevant = {name for name, (_, found) in judged.items() if max(found.values()) > 0}
        if not relevant:
            raise DataError(
                f"{files[2]} has no relevant document for any query. Use another split."
            )
        if empty := [judged[name].line for name in relevant if not queries[name]]:
            raise DataError(f"{files[2]}:{min(empty)}: empty query. Remove it, and its judgments.")
        return cls(
            dict(sorted(documents.items())),
            {name: text for name, text in queries.items() if name in relevant},
            {name: found for name, (_, found) in judged.items()},
            len(queries) - len(relevant),
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
    found = beir.Folder(str(folder), split)
    try:
        return Path(found.corpus()), Path(found.queries()), Path(*found.find()["files"])
    except ConfigError as error:
        files = folder.glob("qrels/*.tsv*")
        there = ", ".join(sorted(path.name.partition(".tsv")[0] for path in files)) or "none"
        raise DataError(f"{error} Splits that are there: {there}.") from error


def _complete(files: tuple[str, ...], reading: beir.Reading[T]) -> T:
    """What is read of one of the files.

    Raises:
        DataError: a line is bad.
    """
    try:
        bad = next(reading)
    except StopIteration as end:
        content: T = end.value
        return content
    raise DataError(
        f"{files[bad.file]}:{bad.line}: {bad.problem}. Correct the file, or download it again."
    )
