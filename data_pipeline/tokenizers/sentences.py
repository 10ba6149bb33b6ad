"""Splits documents into sentences, which the segments of `packing: pairs` consist of.

A splitter reads text alone, so it works with any tokenizer. The manifest records its name and
version, since sentence boundaries are part of a dataset.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

Splitter: TypeAlias = Literal["rules", "lines"]

_VERSIONS: dict[Splitter, int] = {"rules": 1, "lines": 1}  # raise one when its boundaries change

# The full stop, exclamation mark and question mark of Chinese and Japanese.
_FULL_WIDTH = "\u3002\uff01\uff1f"
_MARKS = f".!?\u2026{_FULL_WIDTH}"
_CLOSING = "\"'\u2019\u201d\xbb)\\]\u300d\u300f"
_OPENING = "\"'\u2018\u201c\xab(["
# A possible end of a sentence: marks and closing quotes or brackets, or the end of a line, and the
# white space that follows.
_END = re.compile(rf"[{_MARKS}\n][{_MARKS}{_CLOSING}]*\s*")
_NEXT_LINE = re.compile(r"\n\s*")
_WORD = re.compile(r"[^\W\d_]+\Z")
_LONGEST_WORD = 12  # characters before a full stop in which an abbreviation is searched
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        """adm al apr approx assn aug ave bros ca capt cf ch co col corp dec dept dr ed eds eq esp
        est etc feb fig figs ft gen gov hon inc jan jr jul jun lt ltd maj messrs mr mrs ms mt nos
        nov oct op pp prof pt ref rep rev sec sen sep sept sgt sr st vol vols vs""",
    )
)


def splitter_version(splitter: Splitter) -> str:
    """Returns name and version of a splitter, such as "rules 1"."""
    return f"{splitter} {_VERSIONS[splitter]}"


def split(text: str, splitter: Splitter) -> list[str]:
    """Splits a text into sentences; joined, they are the text. None is empty unless the text is.

    `lines` takes every line that is not blank as a sentence, as BERT's own data preparation does.
    `rules` ends a sentence at a blank line, and at . ! ? or an ellipsis before white space, unless
    the next letter is lower-case, or the full stop belongs to an initial or an abbreviation. The
    full-width marks of Chinese and Japanese need no space.

    The last character of the white space between two sentences belongs to the second one. So
    tokenizers that separate words at white space (WordPiece) or attach it to the next word
    (byte-level BPE) make the same tokens from the sentences as from the whole text.
    """
    firsts = _after_lines(text) if splitter == "lines" else _after_marks(text)
    # "One.  Two." has its second sentence at 6; it is split at 5, into "One. " and " Two.".
    cuts = [first - text[first - 1].isspace() for first in firsts]
    return [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]


def _after_lines(text: str) -> Iterator[int]:
    """Yields the offset of the first visible character of each line but the first."""
    begun = len(text) - len(text.lstrip())
    return (match.end() for match in _NEXT_LINE.finditer(text, begun) if match.end() < len(text))


def _after_marks(text: str) -> Iterator[int]:
    """Yields the offset of the first visible character of each sentence but the first."""
    for match in _END.finditer(text, len(text) - len(text.lstrip())):
        end, first = match[0], match.end()
        if first == len(text):
            return
        if end.count("\n") > 1:  # a blank line
            yield first
        elif end[0] in _FULL_WIDTH:
            # Without a space, another mark or a quote may follow, which belongs to this sentence.
            if end[-1].isspace() or text[first].isalnum():
                yield first
        elif end[0] != "\n" and end[-1].isspace():
            letter = first + 1 if text[first] in _OPENING else first
            if not text[letter : letter + 1].islower() and not _is_abbreviated(text, match):
                yield first


def _is_abbreviated(text: str, match: re.Match[str]) -> bool:
    """Whether the match is a single full stop that belongs to the word before it."""
    if match[0].rstrip() != ".":
        return False
    word = _WORD.search(text, max(0, match.start() - _LONGEST_WORD), match.start())
    if word is None:
        return False
    is_initial = len(word[0]) == 1 and word[0].isupper()
    return is_initial or word[0].lower() in _ABBREVIATIONS
