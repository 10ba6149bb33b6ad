"""Queries with their positives, and the passages to choose negatives from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NotRequired, TypedDict

from data_pipeline.sources.files import read_records
from data_pipeline.sources.kinds.jsonl import lines
from samestep.errors import DataError
from samestep.storage import shown
from samestep.stored_json import JsonError, parse_json
from trainer.inference.retrieval.embed import named_texts
from trainer.training.retrieval.collection import Collection

logger = logging.getLogger(__name__)


class _Line(TypedDict):
    query: str
    positive: str | list[str]
    _id: NotRequired[str | int]


@dataclass(frozen=True)
class Row:
    """A query.

    Attributes:
        name: its id, or else the number of its line.
        positives: numbers of passages, at least one.
    """

    name: str
    query: str
    positives: tuple[int, ...]


@dataclass(frozen=True)
class Pairs:
    """Queries and passages.

    Attributes:
        names: an id of each passage.
        texts: of the passages, all different.
        rows: the queries.
    """

    names: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_collection(cls, folder: Path, split: str) -> Pairs:
        """Reads a folder in BEIR's layout, see `collection`.

        Documents without a text are no passages; queries that have only such positives are left
        out, and named.
        """
        pairs, collection = cls(), Collection.read(folder, split)
        found = {
            name: pairs._add(name, text) for name, text in collection.documents.items() if text
        }
        without = []
        for query, text in collection.queries.items():
            judged = collection.judgments[query].items()
            relevant = [found[name] for name, score in judged if score > 0 and name in found]
            if relevant:
                pairs.rows.append(Row(query, text, tuple(dict.fromkeys(relevant))))
            else:
                without.append(query)
        if collection.unjudged:
            logger.info("%d queries have no relevant document; left out", collection.unjudged)
        if collection.empty:
            logger.warning("%d documents have no text; left out", collection.empty)
        if without:
            listed = ", ".join(without)
            logger.warning("queries without a positive that has a text; left out: %s", listed)
        return pairs

    @classmethod
    def of_rows(cls, file: str, passages: str | None) -> Pairs:
        """Reads JSON Lines of "query" and "positive", a text or a list of texts.

        Args:
            passages: JSON Lines of "text"; a positive is the "_id" or the text of one. None: the
                positives of all rows are the passages.

        Raises:
            DataError: a row has no query or positive, or one that is no passage.
        """
        pairs, found = cls(), dict[str, int]()
        if passages is not None:
            found = {name: pairs._add(name, text) for name, text in named_texts(passages, None)}
        for record in read_records((file,), lines):
            place = f"{shown(file)}:{record.line}"
            if record.problem:
                raise DataError(f"{place}: {record.problem}. Copy or download the file again.")
            try:
                row = parse_json(record.data, _Line)
            except JsonError as error:
                raise DataError(f"{place}: {error}. Correct or remove the line.") from error
            positives = [row["positive"]] if isinstance(row["positive"], str) else row["positive"]
            if not row["query"].strip():
                raise DataError(f"{place} has an empty query. Remove the line.")
            if not positives or not all(text.strip() for text in positives):
                raise DataError(f"{place} has an empty positive. Name one, or remove the line.")
            numbers = []
            for text in positives:
                # As an id first: a corpus may have the text "7" and, elsewhere, the id "7".
                number = found.get(text, pairs.number(text))
                if number is None and passages is None:
                    number = pairs._add(str(len(pairs.texts) + 1), text)
                if number is None:
                    raise DataError(
                        f"{place} has the positive {text[:80]!r}, which is neither an id nor a "
                        f"text of {shown(str(passages))}. Add it there, or correct the line."
                    )
                numbers.append(number)
            name = str(row.get("_id", record.line))
            pairs.rows.append(Row(name, row["query"], tuple(dict.fromkeys(numbers))))
        if not pairs.rows:
            raise DataError(f"{shown(file)} has no rows. Name another file.")
        return pairs

    def positives(self) -> dict[str, set[int]]:
        """The positives of all rows with a query, by its text."""
        # Rows of one query and one positive each are frequent: what is a positive in one of them
        # must not become a negative in another.
        found: dict[str, set[int]] = {}
        for row in self.rows:
            found.setdefault(row.query, set()).update(row.positives)
        return found

    def number(self, text: str) -> int | None:
        """The number of the passage with a text, if there is one."""
        return self._numbers.get(text)

    def digests(self) -> tuple[str, str]:
        """Change with the passages, and with the rows."""
        rows = ([row.name, row.query, *row.positives] for row in self.rows)
        return _digest(zip(self.names, self.texts, strict=True)), _digest(rows)

    def _add(self, name: str, text: str) -> int:
        """The number of a passage; the first id of a text counts."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.names.append(name)
            self.texts.append(text)
        return number


def _digest(rows: Iterable[Iterable[object]]) -> str:
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(list(row)).encode())
    return digest.hexdigest()
