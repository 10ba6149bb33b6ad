"""Rows for a small proofreader: which word of a sentence does not belong there?

The sentences are comments in the code of Python's standard library, which are not among the
docstrings that the demo pre-trains on. In each, one word is replaced by a word of another sentence.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.sources.kinds import python_docs
from samestep.hashing import name_key

# A capital, 5 to 20 words, and a period or colon.
_SENTENCE = re.compile(r"[A-Z][\w'-]*(,? [A-Za-z][\w'-]*){4,19}[.:]")


def write_rows(folder: Path) -> tuple[int, int]:
    """Writes train.jsonl and heldout.jsonl; returns the numbers of their rows.

    Every choice is a hash of the sentence, so machines with the same Python have equal rows.
    """
    keys = {sentence: int(name_key(sentence)) for sentence in _sentences()}
    ordered = sorted(keys, key=keys.__getitem__)
    words = [re.findall(r"[\w'-]+", sentence.lower()) for sentence in ordered]
    # The replacements are as frequent as any word, so that a word alone does not give it away.
    pool = [word for sentence in words for word in sentence]
    rows = []
    for sentence, tokens in zip(ordered, words, strict=True):
        key = keys[sentence]
        at, other = key % len(tokens), key // len(tokens) % len(pool)
        if pool[other] == tokens[at]:
            other -= 1
        tags = ["B-WRONG" if place == at else "O" for place in range(len(tokens))]
        rows.append({"tokens": [*tokens[:at], pool[other], *tokens[at + 1 :]], "tags": tags})
    heldout = len(rows) // 5
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[:heldout]), ("train", rows[heldout:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return len(rows) - heldout, heldout


def _sentences() -> Iterator[str]:
    """Yields the sentences of plain words in the comments of the standard library."""
    for name in python_docs.Config().build().files:
        try:
            code = (python_docs.library() / name).read_text("utf-8")
            tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
        except (SyntaxError, UnicodeError, tokenize.TokenError):  # a template
            continue
        # Comments on successive lines are one text.
        text = ""
        for token in tokens:
            if token.type == tokenize.COMMENT:
                text += token.string.lstrip("# ") + " "
            elif token.type not in (tokenize.NL, tokenize.NEWLINE):
                sentences = re.split(r"(?<=[.!?:]) +", text)
                yield from filter(_SENTENCE.fullmatch, sentences)
                text = ""
