"""Scores of an encoder without training: in retrieval, and in the similarity of sentences."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.sources import BadRecord
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.kinds.jsonl import value_at
from data_pipeline.sources.unlabeled import Unlabeled
from samestep.errors import DataError
from samestep.progress import Progress
from trainer.inference.retrieval import search
from trainer.inference.retrieval.collection import Collection
from trainer.inference.retrieval.embed import comparable
from trainer.inference.retrieval.measures import depth_of, scores
from trainer.inference.retrieval.sentences import Given, SentenceEncoder
from trainer.metrics import labels

logger = logging.getLogger(__name__)

_DOCUMENTS = 4096  # embedded at a time


def of_retrieval(
    checkpoint: str,
    folder: Path,
    split: str,
    measures: Sequence[str],
    given: Given,
) -> dict[str, float]:
    """Ranks all documents for each query; returns the mean of each measure over the queries.

    Documents with equal similarities are in the ascending order of their ids.

    Args:
        folder: see `collection`.
        measures: see `measures.scores`.
        given: see `SentenceEncoder`.

    Raises:
        ConfigError: a measure is unknown.
        DataError: the folder is damaged.
    """
    # Before the model is loaded: an unknown measure should not cost that time.
    depth = depth_of(measures)
    collection = Collection.read(folder, split)
    if collection.unjudged:
        logger.info("%d queries have no relevant document; left out", collection.unjudged)
    if collection.empty:
        logger.warning("%d documents have no text", collection.empty)
    encoder = SentenceEncoder(checkpoint, given)
    queries = encoder(encoder.for_role("query", list(collection.queries.values()))).to(
        encoder.placed
    )
    blocks = _embedded(encoder, list(collection.documents.values()))
    pairs = comparable(encoder.pooling.similarity, queries.to(encoder.placed), blocks)
    _, rows = search.top(*pairs, depth)
    encoder.warn_of_truncation(len(collection.documents) + len(collection.queries))
    # Row n of the search is document n: both have the collection's order, ascending by id.
    names = list(collection.documents)
    rankings = [[names[place] for place in places] for places in rows]
    judgments = [collection.judgments[query] for query in collection.queries]
    found = scores(measures, rankings, judgments)
    return {"queries": len(rankings), "documents": len(names)} | {
        name: float(values.mean()) for name, values in found.items()
    }


def _embedded(encoder: SentenceEncoder, texts: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
    with Progress("embedding", len(texts)) as progress:
        for first in range(0, len(texts), _DOCUMENTS):
            some = encoder.for_role("document", texts[first : first + _DOCUMENTS])
            yield first, encoder(some)
            progress.advance(len(some))


def of_similarity(
    checkpoint: str,
    file: str,
    texts: Sequence[str],
    column: str,
    given: Given,
) -> dict[str, float]:
    """Correlates the similarity of two texts with their score, as in STS (Cer et al. 2017).

    Args:
        file: rows: .jsonl, .csv, .tsv or .parquet, also compressed.
        texts: the columns of the two texts.
        column: of the score.

    Raises:
        DataError: a row lacks a text or its score.
    """
    source = Unlabeled.open(file, tuple(texts), {})
    sides: tuple[list[str], list[str]] = ([], [])
    true = []
    for record in source.records():
        place = f"{source.files[record.file]}:{record.line}"
        try:
            both = source.parse_row(record).texts
            value = value_at(row_of(record.data), column)
            true.append(float(value if isinstance(value, int | float) else str(value)))
            # float() reads "nan" and "inf", which no correlation can use.
            if not math.isfinite(true[-1]):
                raise ValueError
        except BadRecord as error:
            raise DataError(f"{place}: {error}. Correct or remove the row.") from error
        except (KeyError, ValueError, OverflowError):
            raise DataError(
                f"{place} has no number in {column!r}. Correct it, or name another column with "
                "--columns."
            ) from None
        for side, text in zip(sides, both, strict=True):
            side.append(text)
    encoder = SentenceEncoder(checkpoint, given)
    first, second = (encoder(encoder.for_role("default", side)) for side in sides)
    if encoder.pooling.similarity == "cosine":
        first, second = F.normalize(first), F.normalize(second)
    encoder.warn_of_truncation(2 * len(true))
    predicted = torch.linalg.vecdot(first, second).double().numpy()
    names: tuple[Literal["spearman", "pearson"], ...] = ("spearman", "pearson")
    found = labels.scores(names, predicted, torch.tensor(true, dtype=torch.float64).numpy())
    return {"pairs": len(true)} | found
