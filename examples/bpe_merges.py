"""Byte-pair encoding step by step, on the words of Sennrich et al. (2016, algorithm 1).

    python examples/bpe_merges.py
    python examples/bpe_merges.py low:5 lowest:2 newer:6 wider:3 --merges 4

`tokenizers` trains the merges, as `samestep data tokenizer` has it do. Beside them, the same merges
are counted in plain Python, and the program fails if they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

WORDS = ("low:5", "lower:2", "newest:6", "widest:3")
END = "·"
"""Ends each word, as in the paper: "est·" is another token than the "est" in "western"."""


class Merge(NamedTuple):
    """A pair of tokens that becomes one.

    Attributes:
        pair: the tokens.
        times: how often the pair is in the text.
        ties: other pairs that are there as often.
        words: each word after the merge, as its tokens.
    """

    pair: tuple[str, str]
    times: int
    ties: list[tuple[str, str]]
    words: list[list[str]]


def trained(words: dict[str, int], merges: int) -> Tokenizer:
    """Trains a tokenizer with up to so many merges.

    Args:
        words: number of times that each word is in the text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    characters = {character for word in words for character in word + END}
    trainer = trainers.BpeTrainer(vocab_size=len(characters) + merges, show_progress=False)
    text = [f"{word}{END}" for word, count in words.items() for _ in range(count)]
    tokenizer.train_from_iterator([" ".join(text)], trainer)
    return tokenizer


def counted(words: dict[str, int], merges: int) -> list[Merge]:
    """The same merges by hand: each time, the most frequent pair of neighbors becomes a token.

    Of equally frequent pairs, `tokenizers` takes the one whose tokens have the lowest ids: first
    characters in alphabetical order, then merged tokens in the order in which they were made.
    """
    split = {word: [*word, END] for word in words}
    ids = {token: i for i, token in enumerate(sorted({t for each in split.values() for t in each}))}
    found: list[Merge] = []
    while len(found) < merges:
        counts = Counter[tuple[str, str]]()
        for word, tokens in split.items():
            for pair in pairwise(tokens):
                counts[pair] += words[word]
        if not counts:
            break
        most = max(counts.values())
        first, *ties = sorted(
            (pair for pair, count in counts.items() if count == most),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
        ids.setdefault("".join(first), len(ids))
        split = {word: merged(tokens, first) for word, tokens in split.items()}
        found.append(Merge(first, most, ties, list(split.values())))
    return found


def merged(tokens: list[str], pair: tuple[str, str]) -> list[str]:
    """Joins the pair wherever it is, from left to right."""
    made: list[str] = []
    at = 0
    while at < len(tokens):
        size = 2 if tuple(tokens[at : at + 2]) == pair else 1
        made.append("".join(tokens[at : at + size]))
        at += size
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Shows the merges of byte-pair encoding.")
    parser.add_argument("words", nargs="*", default=WORDS, metavar="WORD:COUNT")
    parser.add_argument("--merges", type=int, default=10, metavar="N")
    parser.add_argument("--encode", nargs="*", default=["lowest", "newer"], metavar="WORD")
    args = parser.parse_args(arguments)
    words = {word: int(count) for word, count in (each.rsplit(":", 1) for each in args.words)}
    tokenizer, by_hand = trained(words, args.merges), counted(words, args.merges)
    for number, merge in enumerate(by_hand, start=1):
        ties = f"  (as often: {', '.join(' '.join(pair) for pair in merge.ties)})" * bool(
            merge.ties
        )
        state = "  ".join(" ".join(tokens) for tokens in merge.words)
        print(f"{number:3} {' + '.join(merge.pair):12} {merge.times:3} times   {state}{ties}")  # noqa: T201
    for word in args.encode:
        print(f"{word}: {' '.join(tokenizer.encode(word + END).tokens)}")  # noqa: T201
    theirs = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    if theirs != [merge.pair for merge in by_hand]:
        print(f"tokenizers has other merges: {theirs}")  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
