"""Small datasets for tests of word vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from data_pipeline.format.manifest import ShardInfo
from data_pipeline.format.writing import write_shard
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from tests.datasets import save_manifest

Algorithm = Literal["wordpiece", "bpe", "unigram"]


def write_dataset(
    folder: Path,
    texts: Sequence[str],
    shards: int = 2,
    algorithm: Algorithm = "wordpiece",
    vocab_size: int = 400,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Writes texts as a dataset, as `samestep data build` does, in consecutive shards."""
    folder.mkdir(parents=True)
    if tokenizer is None:
        tokenizer = Config("", algorithm, vocab_size, lowercase=True).train(texts)
    tokenizer.save(folder / "tokenizer")
    documents = tokenizer.encode_batch(texts)

    def write(number: int) -> ShardInfo:
        own = np.array_split(np.arange(len(documents)), shards)[number]
        origin = np.array([(0, line) for line in own], dtype=np.uint32)
        chosen = [documents[line] for line in own]
        return write_shard(folder / f"train-{number:06d}.tar", chosen, origin, np.dtype(np.uint16))

    train = tuple(map(write, range(shards))) if len(documents) else ()
    save_manifest(folder, "texts", len(documents), {"train": train})
    return folder


def random_text(words: int, vocabulary: int, seed: int, documents: int = 7) -> np.ndarray:
    """Word numbers as `write_numbers` writes them: documents of different lengths, -1 after each.

    The word n is about 1/n as frequent as the first.
    """
    generator = np.random.default_rng(seed)
    p = 1 / np.arange(1, vocabulary + 1)
    text = generator.choice(vocabulary, size=words, p=p / p.sum()).astype(np.int32)
    ends = np.sort(generator.choice(np.arange(1, words), size=documents - 1, replace=False))
    return np.append(np.insert(text, ends, -1), -1).astype(np.int32)
