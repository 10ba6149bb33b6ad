"""How many positives, negatives and scores the rows of a retrieval dataset have."""

from __future__ import annotations

import numpy as np

from data_pipeline.packing.retrieval_rows import sizes
from data_pipeline.reading.dataset import Dataset


def count_passages(dataset: Dataset) -> str | None:
    """Describes the rows of a dataset in a line; None unless they are rows of retrieval.

    Two training rows with 3 and 5 negatives and a held-out one with 5 are "rows (train /
    heldout): 2 / 1, with 1 positive and 3 to 5 negatives".

    Raises:
        DataError: a shard is damaged.
    """
    task = dataset.manifest.task
    if task is None or task.kind != "retrieval":
        return None
    splits = {split: dataset.manifest.splits.get(split, ()) for split in ("train", "heldout")}
    rows = " / ".join(f"{sum(info.documents for info in each):,}" for each in splits.values())
    least, most, scored = [], [], False
    for info in (info for each in splits.values() for info in each):
        shard = dataset.read_index(info, labels=True)
        # int64 [rows, 2]: positives and negatives.
        counts = sizes(shard.passage_start)
        least.append(counts.min(axis=0))
        most.append(counts.max(axis=0))
        scored |= bool(shard.labels.size)
    if not least:
        return None
    ends = zip(np.min(least, axis=0).tolist(), np.max(most, axis=0).tolist(), strict=True)
    positives, negatives = (
        _number(low, high, name)
        for (low, high), name in zip(ends, ("positive", "negative"), strict=True)
    )
    scores = ", and scores" if scored else ""
    return f"rows ({' / '.join(splits)}): {rows}, with {positives} and {negatives}{scores}"


def _number(low: int, high: int, name: str) -> str:
    number = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{number} {name}" + ("" if high == 1 else "s")
