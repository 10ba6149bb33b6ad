"""Scores of pairs are those of `transformers` and of `sentence-transformers`' CrossEncoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests import beir
from tests.parity import folders
from trainer.inference.retrieval.rerank import CrossEncoder
from trainer.training.retrieval.collection import Collection


def save(folder: Path, labels: int = 1) -> Path:
    """A random BERT of 32 positions, which some pairs exceed."""
    config = folders.tiny_bert(num_labels=labels)
    model = transformers.BertForSequenceClassification(config).eval()
    folders.save(model, folder, beir.WORDS, scale=2)
    return folder


def pairs_of(collection: Collection) -> list[tuple[str, str]]:
    return [
        (query, text)
        for query in collection.queries.values()
        for text in collection.documents.values()
    ]


@pytest.mark.long
@torch.no_grad()
def test_scores_are_those_of_transformers_in_any_batches(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    collection = Collection.read(beir.write(tmp_path / "set", documents=30, queries=4), "test")
    queries = list(collection.queries.values())
    texts = [list(collection.documents.values())] * len(queries)
    found = [
        np.concatenate(CrossEncoder(str(folder), "--rerank", size).scores(queries, texts))
        for size in (16384, 64)
    ]
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    first, second = zip(*pairs_of(collection), strict=True)
    options = {"truncation": True, "max_length": 32, "padding": True, "return_tensors": "pt"}
    encoded = tokenizer(list(first), list(second), **options)
    assert (encoded["attention_mask"].sum(1) == 32).any()
    expected = model(**encoded).logits[:, 0].numpy()
    assert expected.std() > 0.05
    for each in found:
        np.testing.assert_allclose(each, expected, atol=1e-5)
        np.testing.assert_array_equal(np.argsort(-each), np.argsort(-expected))


@pytest.mark.long
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = save(tmp_path / "model")
    collection = Collection.read(beir.write(tmp_path / "set"), "test")
    theirs = sentence_transformers.CrossEncoder(
        str(folder), max_length=32, device="cpu", activation_fn=torch.nn.Identity()
    )
    expected = theirs.predict(pairs_of(collection))
    names = list(collection.documents)
    reranker = CrossEncoder(str(folder), "--rerank")
    queries, texts = list(collection.queries.values()), list(collection.documents.values())
    found = reranker.scores(queries, [texts] * len(queries))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    # The best ten of each query, as their `rank` orders them; below, the order that was given.
    rankings = reranker.reranked(collection, [names] * len(found), 20)
    for (query, text), ranking in zip(collection.queries.items(), rankings, strict=True):
        documents = [collection.documents[name] for name in names[:20]]
        ranked = [names[row["corpus_id"]] for row in theirs.rank(text, documents)]
        assert ranking == [*ranked, *names[20:]], query
