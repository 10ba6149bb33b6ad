"""The text that the data benchmarks work on, and what is made from it before the clock runs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.pairing import arguments
from data_pipeline.building import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.sources import Source
from data_pipeline.sources.kinds import jsonl, python_docs
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.hashing import combine

_SENTENCES_A_DOCUMENT = 40
VOCAB_SIZE = {"wordpiece": 30_522, "bpe": 50_265}  # BERT's and RoBERTa's


def data_arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all data benchmarks take."""
    parser = arguments(description)
    parser.add_argument(
        "--corpus", nargs="+", default=[], help="JSON Lines; Python's documentation if left out"
    )
    parser.add_argument("--megabytes", type=float, default=16, help="text to work on (default: 16)")
    return parser


def write_corpus(paths: list[str], megabytes: float, file: Path) -> float:
    """Writes the first documents of a corpus as JSON Lines, and returns their text's size in MB.

    Without paths it is Python's documentation, its sentences shuffled anew for each time that they
    are needed. That has few different words for its size.
    """
    texts = _texts(jsonl.Config(tuple(paths)).build() if paths else python_docs.Config().build())
    if not paths:
        texts = shuffled("\n".join(texts))
    size = 0
    with file.open("w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= megabytes * 1e6:
                break
    return size / 1e6


def _texts(source: Source) -> Iterator[str]:
    return (source.parse(record) for record in source.records())


def shuffled(text: str) -> Iterator[str]:
    """Documents without end, of the sentences of a text in an order that changes each time that all
    have been used.
    """
    sentences = [sentence for sentence in re.split(r"(?<=[.:])\s+", text) if sentence]
    turn = 0
    while True:
        order = np.argsort(combine(turn, np.arange(len(sentences))))
        for first in range(0, len(order), _SENTENCES_A_DOCUMENT):
            yield " ".join(sentences[i] for i in order[first : first + _SENTENCES_A_DOCUMENT])
        turn += 1


def read_texts(corpus: Path) -> list[str]:
    """All documents of what `write_corpus` wrote."""
    with corpus.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def make_tokenizer(corpus: Path, algorithm: str, folder: Path) -> Path:
    """Trains a tokenizer of BERT's or RoBERTa's size."""
    config = TokenizerConfig(
        str(folder),
        "bpe" if algorithm == "bpe" else "wordpiece",
        VOCAB_SIZE[algorithm],
        lowercase=algorithm != "bpe",
    )
    config.train(read_texts(corpus)).save(folder)
    return folder


def prepare_dataset(args: argparse.Namespace, folder: Path, shard_bytes: int) -> Path:
    """Makes a WordPiece dataset as the arguments say; returns its folder."""
    corpus = folder / "corpus.jsonl"
    write_corpus(args.corpus, args.megabytes, corpus)
    tokenizer = make_tokenizer(corpus, "wordpiece", folder / "tokenizer")
    return make_dataset(corpus, tokenizer, folder / "dataset", shard_bytes)


def make_dataset(corpus: Path, tokenizer: Path, folder: Path, shard_bytes: int = 2**25) -> Path:
    """Builds a dataset with one worker process."""
    source = jsonl.Config((str(corpus),))
    config = BuildConfig(
        source, TokenizerConfig(str(tokenizer)), str(folder), shard_bytes=shard_bytes, workers=1
    )
    build.build(config)
    return folder
