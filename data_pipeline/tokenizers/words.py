r"""Tokenising each distinct word once.

Text repeats its words, and looking one up is quicker than tokenising it.

A word here is what `\s*\S+` matches, white space included. WordPiece with BERT's pre-tokenizer and
byte-level BPE never form a token across the end of such a word, so the ids of a text are those of
its words, end to end. Nothing is assumed of any other tokenizer, nor of text with control
characters on whose nature Python and `tokenizers` disagree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import tokenizers

from data_pipeline.format.shards import Tokens
from trainer.config import Tree

_WORD = re.compile(r"\s*\S+|\s+")
# White space to Python; BERT deletes them, and so joins what they part.
_UNCLEAR = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_MOST_CHARACTERS = 2**21  # of known words; about 50 MB in all


def ends_tokens_with_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is of a kind of which this module knows that no token goes on from one
    word to the next.
    """
    settings: Tree = json.loads(backend.to_str())
    model, normalizer, splitter = (
        settings[part] or {} for part in ("model", "normalizer", "pre_tokenizer")
    )
    if splitter.get("type") == "BertPreTokenizer":
        fits = model["type"] == "WordPiece" and normalizer.get("type") in (
            None,
            "Lowercase",
            "BertNormalizer",
        )
    else:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        fits = (
            model["type"] == "BPE"
            and normalizer.get("type") in (None, "Lowercase")
            and model["dropout"] is None
        )
        fits = fits and splitter.items() >= byte_level.items()
    return fits and all(
        token["special"] for token in settings["added_tokens"]
    )  # others are found in the whole text


class WordEncoder:
    """Encodes text as `backend` would, remembering the ids of words.

    Args:
        backend: a tokenizer of which `ends_tokens_with_words` is true; it finds no special tokens
            in text.
        dtype: of the ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._backend = backend
        self._dtype = dtype
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens."""
        words = [[text] if _UNCLEAR.search(text) else _WORD.findall(text) for text in texts]
        if self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        if new := set[str]().union(*words).difference(self._known):
            self._learn(list(new))
        return [
            np.frombuffer(b"".join(map(self._known.__getitem__, parts)), self._dtype)
            for parts in words
        ]

    def _learn(self, words: list[str]) -> None:
        # One pre-tokenised text: an answer for each word would cost more than the tokenising.
        encoding = self._backend.encode_batch(
            [words], is_pretokenized=True, add_special_tokens=False
        )[0]
        ids = np.array(encoding.ids, self._dtype).tobytes()
        counts = np.bincount(np.array(encoding.word_ids, np.int64), minlength=len(words))
        ends = np.cumsum(counts) * self._dtype.itemsize
        cuts = pairwise([0, *ends.tolist()])
        self._known.update(
            (word, ids[begin:end]) for word, (begin, end) in zip(words, cuts, strict=True)
        )
        self._characters += sum(map(len, words))
