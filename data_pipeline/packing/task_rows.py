"""Packs rows of a task: documents of one or several texts, each in one or several examples.

A sequence is the special tokens of the `prefix`, the texts with `between` special tokens between
them, and the special tokens of the `suffix`. `Parts.layout` says what a row becomes:

    joined    One sequence of all texts. While it is too long, the longest text loses its last
              token, the later one of two equal texts: `_truncate_seq_pair` of google-research/bert.
    windows   If the last text is too long, several sequences, each with the first text and a window
              of the last one. Windows start `stride` tokens apart until one reaches the end, as in
              BERT's `run_squad.py`.
    choices   For each text but the first, a sequence of the first text and that one, `joined`. All
              sequences of a row are one example, one after the other.
    both_orders  Two sequences, `joined`: the first text before the second, and the second before
              the first. Both are one example.

There are no random choices: a shard has the same examples for every seed and epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import Int64, PackPlan, ranges
from samestep.errors import ConfigError, DataError
from samestep.examples import Examples, PackSpec, Parts


def plan(shard: ShardIndex, spec: PackSpec) -> PackPlan:
    """Packs the rows of a shard that has passed `check`."""
    parts = _parts(spec)
    begin, length = _texts(shard)
    if parts.layout == "windows":
        return _windows(begin, length, spec)
    if parts.layout == "choices":  # [D * choices, 2]
        begin, length = (
            # The first text is the question of all choices: [q, a, b] becomes [q, a] and [q, b].
            np.stack(np.broadcast_arrays(texts[:, :1], texts[:, 1:]), axis=2).reshape(-1, 2)
            for texts in (begin, length)
        )
    elif parts.layout == "both_orders":  # [2 D, 2]
        begin, length = (
            np.stack((texts, texts[:, ::-1]), axis=1).reshape(-1, 2) for texts in (begin, length)
        )
    kept, column = place(length, spec)
    # Rows with fewer texts than the longest one have none in the last columns.
    there = kept > 0
    rows = len(kept) // parts.choices
    chunks = there.reshape(rows, -1).sum(axis=1)
    start = np.concatenate(([0], np.cumsum(chunks)))
    document = np.repeat(np.arange(rows), chunks)
    return PackPlan(start, document, begin[there], kept[there], column[there])


def count_examples(shard: ShardIndex, spec: PackSpec) -> int:
    """Returns the number of examples of `plan`."""
    if _parts(spec).layout != "windows":
        return len(shard.length)
    return int(_window_counts(_texts(shard)[1], spec)[0].sum())


def check(shard: ShardIndex, spec: PackSpec, files: Sequence[str]) -> None:
    """Rejects rows that the layout cannot hold.

    Args:
        files: names of the source files that `shard.origin` refers to.

    Raises:
        DataError: a row has the wrong number of texts; the error names the first one.
        ConfigError: sequences are too short for a token of each text.
    """
    parts = _parts(spec)
    texts = (_texts(shard)[1] > 0).sum(axis=1)
    longest = int(texts.max(initial=1))
    least, most = _texts_of(parts, longest)
    fix = {
        "joined": "remove such rows",
        "windows": "remove such rows, or join their texts",
        "choices": "set objective.choices to the number that all rows have, or remove the others",
        "both_orders": "set objective.both_orders to false",
    }[parts.layout]
    wrong = np.flatnonzero((texts < least) | (texts > most))
    if wrong.size:
        file, line = shard.origin[wrong[0]].tolist()
        raise DataError(
            f"{files[file]}:{line}: the row has {texts[wrong[0]]} texts and the objective reads "
            f"{_either(least, most)} (wrong in {wrong.size} of the {len(texts)} rows of its "
            f"shard); {fix}"
        )
    if parts.layout == "choices":
        longest = 2  # in a sequence
    # Below this, a text would vanish, and the row would mean something else.
    special = spec.prefix + spec.suffix + parts.between * (longest - 1)
    if spec.sequence_length < special + longest:
        raise ConfigError(
            f"data.sequence_length is {spec.sequence_length}, and rows need {special} special "
            f"tokens and a token of each of {longest} texts; use at least {special + longest}"
        )


def wrong_number(texts: int, spec: PackSpec) -> str | None:
    """Says that a row has another number of texts than the objective reads; None if it does not."""
    least, most = _texts_of(_parts(spec), texts)
    if least <= texts <= most:
        return None
    return f"it has {texts} texts and the objective reads {_either(least, most)}"


def _texts_of(parts: Parts, longest: int) -> tuple[int, int]:
    """The least and the largest number of texts that a row may have.

    Args:
        longest: the number of texts of the longest row.
    """
    if parts.layout == "windows":
        return 1, 2
    if parts.layout == "choices":
        return 1 + parts.choices, 1 + parts.choices
    return (2, 2) if parts.layout == "both_orders" else (1, longest)


def _either(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} or {most}"


def filled(examples: Examples, spec: PackSpec) -> Int64:
    """Returns the positions of each example that are not padding: int64 [B]."""
    parts, rows = _parts(spec), len(examples.key)
    texts = np.bincount(examples.row, minlength=rows)
    tokens = np.bincount(examples.row, weights=examples.length, minlength=rows).astype(np.int64)
    around = parts.choices * (spec.prefix + spec.suffix)
    return tokens + around + parts.between * (texts - parts.choices)


def lengths(shard: ShardIndex) -> Int64:
    """Returns the tokens of each text: int64 [D, texts], 0 where a row has fewer texts."""
    return _texts(shard)[1]


def _parts(spec: PackSpec) -> Parts:
    assert spec.parts is not None
    return spec.parts


def _texts(shard: ShardIndex) -> tuple[Int64, Int64]:
    """The first token of each text within its row, and its length: int64 [D, texts] each."""
    first = np.cumsum(shard.length) - shard.length
    # The row of each text: `sentences` counts tokens over all rows.
    row = np.searchsorted(first + shard.length, shard.sentences, side="right")
    texts = np.bincount(row, minlength=len(first))
    number = ranges(np.zeros_like(texts), texts)
    begin = np.zeros((len(first), texts.max(initial=1)), dtype=np.int64)
    length = np.zeros_like(begin)
    begin[row, number] = shard.sentences - first[row]
    length[row, number] = np.diff(shard.sentences, append=shard.length.sum())
    return begin, length


def place(length: Int64, spec: PackSpec) -> tuple[Int64, Int64]:
    """Tokens that each text keeps, and their first column, from lengths [sequences, texts]."""
    parts, kept = _parts(spec), _cut(length, spec)
    # A text starts after the prefix and, for each text before it, that text and `between` tokens.
    # Sequences of `choices` follow each other in an example.
    column = spec.prefix + np.cumsum(kept + parts.between, axis=1) - kept - parts.between
    column += np.arange(len(kept))[:, None] % parts.choices * spec.sequence_length
    return kept, column


def _cut(length: Int64, spec: PackSpec) -> Int64:
    """The number of tokens that each text keeps in a joined sequence: int64 [D, texts].

    The result of the loop in `_truncate_seq_pair` has a closed form: all texts longer than a cap
    are truncated to it, and the positions left over go to the first of these texts, one each. For
    10 positions, lengths 2, 9 and 7 become 2, 4 and 4; for 11, they become 2, 5 and 4.
    """
    most = length.shape[1]
    texts = (length > 0).sum(axis=1)
    room = spec.sequence_length - spec.prefix - spec.suffix - _parts(spec).between * (texts - 1)
    cap, left = np.full(len(length), -1), room.copy()
    # From the shortest text to the longest: a text that needs less than an equal share leaves more
    # to the others. The first one that needs more sets the cap.
    for number, shortest in enumerate(np.sort(length, axis=1).T):
        fair = left // (most - number)
        cap = np.where((cap < 0) & (shortest > fair), fair, cap)
        left -= np.where(cap < 0, shortest, 0)
    cap = np.where(cap < 0, length.max(axis=1, initial=0), cap)[:, None]
    kept: Int64 = np.minimum(length, cap)
    longer = length > cap
    kept += longer & (np.cumsum(longer, axis=1) <= (room - kept.sum(axis=1))[:, None])
    return kept


def _window_counts(length: Int64, spec: PackSpec) -> tuple[Int64, Int64, Int64, Int64]:
    """For each row: windows, tokens of the first text, tokens and step of windows, int64 [D]."""
    parts = _parts(spec)
    room = spec.sequence_length - spec.prefix - spec.suffix
    has_two = (length > 0).sum(axis=1) > 1
    most = room - parts.between - 1  # leaves a token for the window
    if parts.most is not None:
        most = min(parts.most, most)
    before = np.where(has_two, np.minimum(length[:, 0], most), 0)
    # A window has what the first text and the token between leave.
    size = room - np.where(before > 0, before + parts.between, 0)
    step = size if parts.stride is None else np.minimum(size, parts.stride)
    last = length[np.arange(len(length)), has_two.astype(np.int64)]
    # The last window ends with the text: 10 tokens in windows of 4 and steps of 3 are 3 windows.
    return 1 + -(-np.maximum(last - size, 0) // step), before, size, step


def _windows(begin: Int64, length: Int64, spec: PackSpec) -> PackPlan:
    count, before, size, step = _window_counts(length, spec)
    row = np.repeat(np.arange(len(count)), count)
    last = ((length > 0).sum(axis=1) > 1).astype(np.int64)[row]
    offset = ranges(np.zeros_like(count), count) * step[row]
    window = np.minimum(size[row], length[row, last] - offset)
    first = before[row]
    there = np.stack((first > 0, np.ones(len(row), dtype=np.bool_)), axis=1)
    behind = spec.prefix + np.where(first > 0, first + _parts(spec).between, 0)
    chunks = there.sum(axis=1)
    return PackPlan(
        example_start=np.concatenate(([0], np.cumsum(chunks))),
        document=np.repeat(row, chunks),
        begin=np.stack((begin[row, 0], begin[row, last] + offset), axis=1)[there],
        length=np.stack((first, window), axis=1)[there],
        column=np.stack((np.full(len(row), spec.prefix), behind), axis=1)[there],
    )
