r"""Tokenizes each distinct word once: words repeat, and a look-up is faster than tokenization.

A word here is a match of `\s*\S+`, white space included. WordPiece and words with BERT's
pre-tokenizer, and byte-level BPE, never form a token across the end of such a word, so the ids of a
text are the ids of its words, one after the other. Other tokenizers, and texts with control
characters that Python and `tokenizers` classify differently, are not split into words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import tokenizers

from data_pipeline.format.shards import Tokens
from samestep.config import Tree

_WORD = re.compile(r"\s*\S+|\s+")
# White space for Python. BERT's normalizer deletes these characters, and so joins the words on both
# sides.
_UNCLEAR = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_MOST_CHARACTERS = 2**21  # of remembered words; about 50 MB in all


def ends_tokens_with_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is of a kind known to end its tokens where words end."""
    settings: Tree = json.loads(backend.to_str())
    # Other added tokens are searched in the whole text, across words.
    if not all(token["special"] for token in settings["added_tokens"]):
        return False
    model = settings["model"]
    normalizer = (settings["normalizer"] or {}).get("type")
    splitter = settings["pre_tokenizer"] or {}
    if splitter.get("type") == "BertPreTokenizer":
        known = (None, "Lowercase", "BertNormalizer")
        return model["type"] in ("WordPiece", "WordLevel") and normalizer in known
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if not splitter.items() >= byte_level.items():
        return False
    # With dropout, a word has other tokens each time.
    is_plain = model["type"] == "BPE" and model["dropout"] is None
    return is_plain and normalizer in (None, "Lowercase")


class WordEncoder:
    """Encodes text as `backend` would, remembering the ids of words.

    Args:
        backend: a tokenizer that `ends_tokens_with_words`; it finds no special tokens in text.
        dtype: of the ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        dtype: np.dtype[np.unsignedinteger],
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._known: dict[str, bytes] = {}
        self._characters = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, without special tokens."""
        words = [[text] if _UNCLEAR.search(text) else _WORD.findall(text) for text in texts]
        # Forget all rather than the oldest: it happens once in many batches, and the next batch
        # brings back the frequent words.
        if self._characters > _MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        if new := set[str]().union(*words).difference(self._known):
            self._learn(list(new))
        # As bytes, ids are joined in one call, without an array per word.
        contents = (b"".join(map(self._known.__getitem__, parts)) for parts in words)
        return [np.frombuffer(content, self._dtype) for content in contents]

    def _learn(self, words: list[str]) -> None:
        # All words as one pre-tokenized text: an encoding object per word would cost more than the
        # tokenization itself.
        (encoding,) = self._backend.encode_batch(
            [words], is_pretokenized=True, add_special_tokens=False
        )
        ids = np.array(encoding.ids, self._dtype).tobytes()
        counts = np.bincount(np.array(encoding.word_ids, np.int64), minlength=len(words))
        ends = np.cumsum(counts) * self._dtype.itemsize
        # Two words of 1 and 2 tokens, as uint16: bytes [0, 2) and [2, 6).
        for word, (begin, end) in zip(words, pairwise([0, *ends.tolist()]), strict=True):
            self._known[word] = ids[begin:end]
        self._characters += sum(map(len, words))
