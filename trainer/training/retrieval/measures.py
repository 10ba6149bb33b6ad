"""Scores of rankings, as trec_eval and sentence-transformers define them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.errors import ConfigError

Float64: TypeAlias = npt.NDArray[np.float64]

MEASURES = ("ndcg@10", "mrr@10", "recall@10", "recall@100", "map@100", "accuracy@1")
_KNOWN = ("accuracy", "map", "mrr", "ndcg", "precision", "recall")


def depth_of(measures: Sequence[str]) -> int:
    """The number of ranks that the measures read, such as 100 for recall@100.

    Raises:
        ConfigError: one is unknown.
    """
    return max(_parsed(name)[1] for name in measures)


def scores(
    measures: Sequence[str],
    rankings: Sequence[Sequence[str]],
    judgments: Sequence[Mapping[str, int]],
) -> dict[str, Float64]:
    """Computes measures of Q queries.

        ndcg@k: discounted gain of the first k ranks, rel / log2(rank + 1), as a share of the best
            possible (Järvelin and Kekäläinen 2002)
        mrr@k: 1 / rank of the first relevant document, 0 beyond rank k
        map@k: mean of the precisions at the ranks of relevant documents up to k, over all of them
        recall@k, precision@k: relevant documents among the first k, as a share of all of them, of k
        accuracy@k: whether a relevant document is among the first k

    Args:
        measures: their names.
        rankings: documents, from the best match on, for each query.
        judgments: how relevant each judged document is; 0 and less are not relevant, nor are
            documents without a judgment. Each query has a relevant one.

    Returns:
        float64 [Q] by measure.

    Raises:
        ConfigError: a measure is unknown.
    """
    wanted = [_parsed(name) for name in measures]
    depth = max(k for _, k in wanted)
    gains, best = (np.zeros((len(rankings), depth)) for _ in range(2))
    relevant = np.zeros(len(rankings))
    for query, (ranking, judged) in enumerate(zip(rankings, judgments, strict=True)):
        # A ranking may be shorter than `depth`; the ranks that it lacks keep a gain of 0.
        found = [max(0, judged.get(document, 0)) for document in ranking[:depth]]
        gains[query, : len(found)] = found
        # The best order of all judged documents: relevances 0 1 2 become gains 2 1.
        ideal = sorted((gain for gain in judged.values() if gain > 0), reverse=True)
        relevant[query] = len(ideal)
        best[query, : len(ideal[:depth])] = ideal[:depth]
    return {
        name: _measure(kind, gains[:, :k], best[:, :k], relevant)
        for name, (kind, k) in zip(measures, wanted, strict=True)
    }


def _parsed(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"([a-z]+)@([1-9]\d{0,3})", name)
    if not match or match[1] not in _KNOWN:
        raise ConfigError(
            f"{name} is no measure of rankings. Use one of {', '.join(_KNOWN)} with a number of "
            "ranks up to 9999, such as ndcg@10."
        )
    return match[1], int(match[2])


def _measure(kind: str, gains: Float64, best: Float64, relevant: Float64) -> Float64:
    """[Q] of gains [Q, k] in the order found and in the best order, and relevant documents [Q]."""
    # Example for the measures below: relevant documents are at ranks 2 and 4 of k = 4, and a third
    # one was not found. Hits are 0 1 0 1, and `relevant` is 3.
    hits = gains > 0
    ranks = np.arange(1, gains.shape[1] + 1)
    if kind == "ndcg":
        # 1 at rank 1, 1.58 at rank 2, 2 at rank 3.
        discounts = np.log2(ranks + 1)
        return np.asarray((gains / discounts).sum(1) / (best / discounts).sum(1))
    if kind == "mrr":
        # max(0, 1/2, 0, 1/4) = 1/2
        return np.asarray((hits / ranks).max(1))
    if kind == "map":
        # Precisions 1/2 at rank 2 and 2/4 at rank 4, divided by all three: 1/3.
        return np.asarray((hits.cumsum(1) * hits / ranks).sum(1) / relevant)
    if kind == "recall":
        # 2 of 3 relevant documents are among the first 4.
        return np.asarray(hits.sum(1) / relevant)
    # precision@4 is 2/4, and accuracy@4 is 1.
    return np.asarray(hits.mean(1) if kind == "precision" else hits.any(1), np.float64)
