"""Word vectors beside gensim, which trains skip-gram and CBOW with negative sampling.

gensim is not a dependency: `pip install gensim` runs these tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.tokenizers.tokenizer import Config
from tests.unit.vectors.corpora import random_text
from trainer.vectors.corpus import Words
from trainer.vectors.folder import WordVectors
from trainer.vectors.settings import Settings
from trainer.vectors.windows import keep_probabilities
from trainer.vectors.word2vec import train
from trainer.vectors.work import State

gensim = pytest.importorskip("gensim.models", reason="gensim is not installed")

TOPICS, WORDS_OF_TOPIC = 6, 10
V = TOPICS * WORDS_OF_TOPIC


def topical_text(sentences: int) -> np.ndarray:
    """Sentences of 8 words, 6 of one topic and 2 of any; the word n has the topic n % TOPICS."""
    generator = np.random.default_rng(0)
    topic = generator.integers(TOPICS, size=(sentences, 1))
    own = topic + TOPICS * generator.integers(WORDS_OF_TOPIC, size=(sentences, 6))
    other = generator.integers(V, size=(sentences, 2))
    words = generator.permuted(np.concatenate([own, other], axis=1), axis=1)
    return np.insert(words, 8, -1, axis=1).ravel().astype(np.int32)


def sentences_of(text: np.ndarray) -> list[list[str]]:
    parts = np.split(text, np.flatnonzero(text == -1) + 1)
    return [[f"w{word}" for word in part[:-1].tolist()] for part in parts if len(part) > 1]


def words_of(text: np.ndarray, vocabulary: int) -> Words:
    counts = np.bincount(text[text >= 0], minlength=vocabulary)
    return Words([f"w{n}" for n in range(vocabulary)], counts, None)


def test_keep_probabilities() -> None:
    text = random_text(20_000, 40, seed=1)
    theirs = gensim.Word2Vec(sentences_of(text), min_count=1, sample=0.01, vector_size=2, epochs=1)
    ours = keep_probabilities(words_of(text, 40).counts, 0.01)
    found = [theirs.wv.get_vecattr(f"w{n}", "sample_int") / 2**32 for n in range(40)]
    assert found == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("method", ["skipgram", "cbow"])
def test_the_same_words_are_similar(tmp_path: Path, method: str) -> None:
    text = topical_text(3000)
    settings = Settings.of(
        method, {"dimensions": 10, "epochs": 8, "subsample": 0.0, "batch_size": 64}
    )
    words = words_of(text, V)
    ours = train(text, words, settings, State(tmp_path / "state"), lambda *_: None)
    theirs = gensim.Word2Vec(
        sentences_of(text),
        vector_size=10,
        sg=int(method == "skipgram"),
        epochs=8,
        sample=0.0,
        min_count=1,
        alpha=settings.rate,
        workers=1,
        seed=1,
    )
    table = np.stack([theirs.wv[f"w{n}"] for n in range(V)])
    similar = []
    for vectors in (ours.numpy(), table):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        similar.append((unit @ unit.T)[np.triu_indices(V, 1)])
    same_topic = (np.arange(V)[:, None] % TOPICS == np.arange(V) % TOPICS)[np.triu_indices(V, 1)]
    for cosines in similar:
        assert cosines[same_topic].min() > np.quantile(cosines[~same_topic], 0.95)
    assert np.corrcoef(*similar)[0, 1] > 0.9


def test_text_files_are_read(tmp_path: Path) -> None:
    names = ["play", "don't", "über-play", "game"]
    tokenizer = Config("", "wordpiece", 100).train(names * 3)
    table = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    description = {"settings": {"dimensions": 7}}
    made = WordVectors(names, table, None, description, tokenizer)
    made.save(tmp_path, text=True)
    theirs = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert theirs.index_to_key == names
    assert np.array_equal(theirs.vectors, table.numpy())
    for name in names:
        ours = [(word, cosine) for cosine, word in made.nearest(made.find(name), 3)]
        found = theirs.most_similar(name, topn=3)
        assert [word for word, _ in found] == [word for word, _ in ours]
        assert [cosine for _, cosine in found] == pytest.approx([c for _, c in ours], abs=1e-6)
