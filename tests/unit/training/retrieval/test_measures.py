"""Measures of rankings, against sentence-transformers and trec_eval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytrec_eval
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from samestep.errors import ConfigError
from trainer.training.retrieval.measures import scores

MEASURES = ("ndcg@10", "mrr@5", "map@100", "recall@10", "precision@3", "accuracy@2")
DOCUMENTS = [f"d{number:03}" for number in range(150)]


def random_queries(
    most_relevant: int, seed: int = 0
) -> list[tuple[dict[str, float], dict[str, int]]]:
    """Similarities with many ties, and judgments, some of them 0."""
    generator = np.random.default_rng(seed)
    queries = []
    for _ in range(40):
        similar = generator.integers(0, 12, len(DOCUMENTS)) / 12
        judged = generator.choice(DOCUMENTS, generator.integers(1, 30), replace=False)
        relevance = generator.integers(0, most_relevant + 1, len(judged))
        relevance[0] = most_relevant
        queries.append(
            (
                dict(zip(DOCUMENTS, similar.tolist(), strict=True)),
                dict(zip(judged.tolist(), relevance.tolist(), strict=True)),
            )
        )
    return queries


def ranked(similar: dict[str, float], *, last_first: bool = False) -> list[str]:
    names = sorted(similar, reverse=last_first)
    return sorted(names, key=lambda name: -similar[name])


def test_they_are_those_of_sentence_transformers() -> None:
    queries = random_queries(1)
    names = [f"q{number}" for number in range(len(queries))]
    theirs = InformationRetrievalEvaluator(
        dict.fromkeys(names, "x"),
        dict.fromkeys(DOCUMENTS, "x"),
        {
            name: {document for document, gain in judged.items() if gain}
            for name, (_, judged) in zip(names, queries, strict=True)
        },
        mrr_at_k=[5],
        ndcg_at_k=[10],
        accuracy_at_k=[2],
        precision_recall_at_k=[3, 10],
        map_at_k=[100],
    )
    hits: list[Any] = [
        [{"corpus_id": name, "score": score} for name, score in similar.items()]
        for similar, _ in queries
    ]
    found = theirs.compute_metrics(hits)
    ours = scores(MEASURES, [ranked(similar) for similar, _ in queries], [j for _, j in queries])
    for name in MEASURES:
        kind, k = name.split("@")
        assert ours[name].mean() == pytest.approx(found[f"{kind}@k"][int(k)], abs=1e-6), name


def test_they_are_those_of_trec_eval() -> None:
    """Its documents of equal similarity are in descending order of their names."""
    queries = random_queries(3)
    names = [f"q{number}" for number in range(len(queries))]
    theirs = {"ndcg_cut.10": "ndcg@10", "map_cut.100": "map@100", "recall.10": "recall@10",
              "P.5": "precision@5", "recip_rank": "mrr@150", "success.1": "accuracy@1"}  # fmt: skip
    found = pytrec_eval.RelevanceEvaluator(
        {name: judged for name, (_, judged) in zip(names, queries, strict=True)}, set(theirs)
    ).evaluate({name: similar for name, (similar, _) in zip(names, queries, strict=True)})
    rankings = [ranked(similar, last_first=True) for similar, _ in queries]
    ours = scores(list(theirs.values()), rankings, [judged for _, judged in queries])
    for their_name, name in theirs.items():
        expected = [found[query][their_name.replace(".", "_")] for query in names]
        np.testing.assert_allclose(ours[name], expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["ndcg", "ndcg@0", "ndcg@10000", "hits@3", "NDCG@10"])
def test_an_unknown_measure_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is no measure of rankings"):
        scores([name], [["a"]], [{"a": 1}])
