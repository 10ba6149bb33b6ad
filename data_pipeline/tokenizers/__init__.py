"""Tokenizers, and what prepares text for them.

Here: which tokens a vocabulary has, by their spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

SPACE = "▁"
"""In SentencePiece models: begins the first piece of a word."""

# A full stop as a token of its own, with the marks that tokenizers have for a space before it, or
# for no space (WordPiece).
_FULL_STOPS = frozenset((".", "\u2581.", "\u0120.", "##.", "\u3002", "\u2581\u3002", "##\u3002"))


def full_stops(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids of the tokens that are a full stop, which end sentences of tokens."""
    return tuple(sorted(vocabulary[token] for token in _FULL_STOPS & vocabulary.keys()))


def sentinels_in(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids of <extra_id_0>, <extra_id_1>, ... in a vocabulary; mT5 spells ▁ first."""
    ids = list[int]()
    while True:
        name = f"<extra_id_{len(ids)}>"
        token_id = vocabulary.get(name, vocabulary.get(SPACE + name))
        if token_id is None:
            return tuple(ids)
        ids.append(token_id)
