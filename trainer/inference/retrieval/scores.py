"""Scores of an encoder in the similarity of sentences."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from data_pipeline.sources import BadRecord
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.kinds.jsonl import value_at
from data_pipeline.sources.unlabeled import Unlabeled
from samestep.errors import DataError
from trainer.inference.retrieval.sentences import Given, SentenceEncoder
from trainer.metrics import labels

logger = logging.getLogger(__name__)


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
