"""Limits on tokenizers of strangers: what they may make of a text, and how their errors end."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from samestep.config import Tree
from samestep.errors import DataError

if TYPE_CHECKING:
    import tokenizers

# NFKC makes 18 characters of one (U+FDFA), and ▁ before each word doubles a text of short words.
_MOST_EXPANSION = 256
_MOST_WORD = 10_000  # characters; WordPiece takes the square of it, and BERT has 100
_UNUSED_IDS = 2**16
MOST_SENTINELS = 2**16


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turns failures inside of tokenizers' libraries into errors of the tokenizer's file.

    Raises:
        DataError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        # A panic of Rust is no Exception, and its class cannot be imported.
        is_panic = type(error).__name__ == "PanicException"
        # `tokenizers` raises bare Exception, and `sentencepiece` RuntimeError.
        if not is_panic and type(error) not in (Exception, RuntimeError, IndexError):
            raise
        raise DataError(
            f"the tokenizer fails ({error}). Copy or download its files again."
        ) from error


def check_limits(backend: tokenizers.Tokenizer) -> None:
    """Rejects a tokenizer by which a small text takes all memory or time.

    Raises:
        DataError: with the part that would.
    """
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            _check_expansion(_expansion(json.loads(part.__getstate__())), f"the {name}")
    longest = getattr(backend.model, "max_input_chars_per_word", 0)
    if longest > _MOST_WORD:
        raise DataError(
            f"max_input_chars_per_word is {longest}, more than {_MOST_WORD}. BERT has 100."
        )


def check_ids(vocabulary: dict[str, int]) -> None:
    """Rejects ids that are far apart: embeddings and tables have a row for each.

    Raises:
        DataError: there are.
    """
    size, count = max(vocabulary.values(), default=-1) + 1, len(vocabulary)
    if size > 2 * count + _UNUSED_IDS:
        raise DataError(
            f"the largest token id is {size - 1}, and there are {count} tokens. Number the tokens "
            "from 0."
        )


def check_charsmap(charsmap: bytes) -> None:
    """Rejects a SentencePiece normalizer that makes a long text of a character.

    Raises:
        DataError: it does.
    """
    _check_expansion(_longest(charsmap), "the normalizer")


def _check_expansion(most: float, part: str) -> None:
    if most > _MOST_EXPANSION:
        raise DataError(
            f"{part} makes up to {most:.0f} characters of one, more than {_MOST_EXPANSION}. Use "
            "another tokenizer."
        )


def _expansion(part: Tree) -> float:
    """Upper bound of the characters that a normalizer or decoder makes of one."""
    kind = part.get("type")
    if kind == "Sequence":
        return math.prod(map(_expansion, part.get("normalizers") or part.get("decoders") or []))
    if kind == "Replace":
        pattern: dict[str, Any] = part["pattern"]
        content = len(part["content"])
        # A regular expression, and an empty string, may match between any two characters.
        matched = len(pattern.get("String", ""))
        return max(1, content / matched) if matched else 1 + content
    if kind == "Prepend":
        return 1 + len(part["prepend"])
    if kind == "Precompiled":
        return _longest(base64.b64decode(part["precompiled_charsmap"]))
    return 1


def _longest(charsmap: bytes) -> int:
    """Characters of the longest replacement in a charsmap.

    It is the size of a trie (uint32), the trie, and texts that end with a zero.
    """
    begin = 4 + int.from_bytes(charsmap[:4], "little")
    texts = charsmap[begin:].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
