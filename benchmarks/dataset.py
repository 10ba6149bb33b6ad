"""A dataset of random tokens, for measurements in which the text does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.writing import write_shard
from data_pipeline.tokenizers.huggingface import HuggingFace
from data_pipeline.tokenizers.sentences import splitter_version
from data_pipeline.tokenizers.tokenizer import Tokenizer

VOCAB_SIZE = 30_522
"""The size of BERT's vocabulary."""


def write_dataset(
    folder: Path,
    lengths: Sequence[int] = (2**18,) * 16,
    vocab_size: int = VOCAB_SIZE,
    sentinels: int = 0,
    sentence: int | None = None,
) -> None:
    """Writes documents of random words of a made-up vocabulary, all in one shard.

    Args:
        lengths: tokens of each document.
        sentinels: number of T5's sentinels in the vocabulary; with any, it has </s> as well.
        sentence: tokens of a sentence; None stores no sentences.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(["</s>"] if sentinels else [])]
    words = [f"w{i}" for i in range(vocab_size - len(special) - sentinels)]
    extra = [f"<extra_id_{i}>" for i in range(sentinels)]
    model = tokenizers.models.WordPiece(
        {token: i for i, token in enumerate([*special, *words, *extra])}, unk_token="[UNK]"
    )
    tokenizer = Tokenizer(HuggingFace(tokenizers.Tokenizer(model), {}))
    tokenizer.save(folder / "tokenizer")
    first, after = len(special), len(special) + len(words)
    values = np.random.default_rng(0).integers(first, after, sum(lengths), dtype=np.uint16)
    origin = np.array([(0, i) for i in range(len(lengths))], dtype=np.uint32)
    documents = np.split(values, np.cumsum(lengths)[:-1])
    sentences = None
    if sentence is not None:
        sentences = [np.arange(0, length, sentence) for length in lengths]
    shard = write_shard(folder / "train-000000.tar", documents, origin, values.dtype, sentences)
    Manifest(
        format=FORMAT,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=vocab_size,
        dtype=values.dtype.name,
        source={},
        files=("random",),
        documents_in=len(lengths),
        documents_rejected={},
        splits={"train": (shard,), "heldout": ()},
        settings={} if sentence is None else {"sentences": splitter_version("rules")},
    ).save(folder)
