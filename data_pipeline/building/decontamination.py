"""Finds documents that contain text of a test, which a model must not be trained on.

A document is left out if it has the same 13 words in a row as a text of the test, as in GPT-3
(Brown et al. 2020, arXiv 2005.14165, appendix C). Upper case and punctuation do not matter.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated
from zlib import crc32

import numpy as np
import numpy.typing as npt

from data_pipeline.sources import BadRecord, SourceConfig
from samestep.config import Kinds, Tree
from samestep.errors import ConfigError
from samestep.hashing import mix
from samestep.storage import shown

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # any odd number


@dataclass(frozen=True)
class Config:
    """The section `decontaminate` of a dataset's recipe.

    Attributes:
        source: the texts of the test.
        ngram: words in a row that a document must not share with them.
        shortest: a text of fewer words than `ngram`, but at least these, must not occur as a whole.
            Shorter ones are not looked for.
    """

    source: Annotated[SourceConfig, Kinds("data_pipeline.sources.kinds")]
    ngram: int = 13
    shortest: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.ngram:
            raise ConfigError(
                f"decontaminate.shortest is {self.shortest} and ngram is {self.ngram}. Use 1 or "
                "more words, and at most ngram."
            )

    def build(self) -> Matcher:
        """Reads the test.

        Raises:
            ConfigError: it has no text that is long enough.
            DataError: a file cannot be read.
        """
        source, texts = self.source.build(), list[str]()
        for record in itertools.chain(source.passages(), source.records()):
            try:
                texts.append(source.parse(record))
            except BadRecord as error:
                file = shown(source.files[record.file])
                raise ConfigError(
                    f"decontaminate.source: {file}:{record.line}: {error}. Correct the file, or "
                    "name another field."
                ) from None
        matcher = Matcher(texts, self.ngram, self.shortest)
        if not matcher.hashes:
            raise ConfigError(
                f"decontaminate.source has no text of {self.shortest} words or more. Lower "
                "decontaminate.shortest, or leave the section out."
            )
        return matcher


class Matcher:
    """Looks for the n-grams of a test in documents.

    Attributes:
        hashes: number of words -> sorted uint64 [N], hashes of that many words in a row.
    """

    def __init__(self, texts: Iterable[str], ngram: int, shortest: int) -> None:
        found: dict[int, list[npt.NDArray[np.uint64]]] = defaultdict(list)
        for text in texts:
            words = _words(text)
            if len(words) >= shortest:
                size = min(ngram, len(words))
                found[size].append(_ngrams(words, size))
        self.hashes = {size: np.unique(np.concatenate(each)) for size, each in found.items()}

    def matches(self, text: str) -> bool:
        """Whether a document shares words with the test."""
        words = _words(text)
        for size, hashes in self.hashes.items():
            ngrams = _ngrams(words, size)
            at = np.searchsorted(hashes, ngrams)
            if (hashes[np.minimum(at, len(hashes) - 1)] == ngrams).any():
                return True
        return False

    def settings(self) -> Tree:
        """What the result depends on, for the manifest."""
        digest = hashlib.sha256()
        for size, hashes in sorted(self.hashes.items()):
            digest.update(f"{size} ".encode() + hashes.tobytes())
        return {"test": digest.hexdigest()}


def _words(text: str) -> npt.NDArray[np.uint64]:
    """A hash of each word: uint64 [N]."""
    words = _WORD.findall(text.lower())
    return mix(np.fromiter((crc32(word.encode()) for word in words), np.uint64, len(words)))


def _ngrams(words: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """A hash of each `size` words in a row: uint64 [N - size + 1], or [0]."""
    count = max(0, len(words) - size + 1)
    hashes = np.zeros(count, np.uint64)
    for i in range(size):
        hashes = hashes * _FACTOR + words[i : i + count]
    return hashes
