"""Packing rows of a task, which are documents of one or several texts: each fills an example or more by itself.

A sequence is a row of cells: the special tokens of the `prefix`, the texts with `between` special tokens from one to
the next, and those of the `suffix`. What a row becomes is its `Parts.layout`:

    joined    one sequence of all texts. What is too long loses the last token of its longest text, of the later of
              equal ones, until it fits: the `_truncate_seq_pair` of google-research/bert (Devlin et al. 2019).
    windows   one sequence, or where the last text is too long several, which hold windows of it, each behind the first
              text. As in BERT's `run_squad.py`, windows begin `stride` tokens apart until one reaches the end.
    choices   for each text but the first a sequence, `joined` of the first text and it; side by side in one example.

No random choice is made, so a shard has the same examples whatever the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing.plans import Int64, PackPlan, ranges
from trainer.errors import ConfigError, DataError
from trainer.examples import Examples, PackSpec, Parts


def plan(shard: ShardIndex, spec: PackSpec) -> PackPlan:
    """Makes the examples of a shard whose rows passed `check`.

    Args:
        shard: with its parts.
        spec: of rows of a task.
    """
    parts = _parts(spec)
    begin, length = _texts(shard)
    if parts.layout == "windows":
        return _windows(begin, length, spec)
    if parts.layout == "choices":  # [D * choices, 2]
        begin, length = (
            np.stack(np.broadcast_arrays(texts[:, :1], texts[:, 1:]), axis=2).reshape(-1, 2)
            for texts in (begin, length)
        )
    kept = _cut(length, spec)
    column = spec.prefix + np.cumsum(kept + parts.between, axis=1) - kept - parts.between
    column += np.arange(len(kept))[:, None] % parts.choices * spec.sequence_length
    there = kept > 0
    rows = len(kept) // parts.choices
    pieces = there.reshape(rows, -1).sum(axis=1)
    start = np.concatenate(([0], np.cumsum(pieces)))
    return PackPlan(
        start, np.repeat(np.arange(rows), pieces), begin[there], kept[there], column[there]
    )


def count_examples(shard: ShardIndex, spec: PackSpec) -> int:
    """The number of examples of `plan`."""
    if _parts(spec).layout != "windows":
        return len(shard.length)
    return int(_window_counts(_texts(shard)[1], spec)[0].sum())


def check(shard: ShardIndex, spec: PackSpec, files: Sequence[str]) -> None:
    """Refuses rows that have another number of texts than the layout, or more than a sequence has cells for.

    Args:
        shard: with its parts.
        spec: of rows of a task.
        files: the names of source files that `shard.origin` counts.

    Raises:
        DataError: naming the first row with another number of texts.
        ConfigError: sequences are too short for a token of each text.
    """
    parts = _parts(spec)
    texts = (_texts(shard)[1] > 0).sum(axis=1)
    longest = int(texts.max(initial=1))
    least, most, fix = 1, longest, "remove such rows"
    if parts.layout == "windows":
        most, fix = 2, "remove such rows, or join their texts"
    elif parts.layout == "choices":
        least = most = 1 + parts.choices
        fix = "set objective.choices to what all rows have, or remove those that have more or fewer"
    wrong = np.flatnonzero((texts < least) | (texts > most))
    if wrong.size:
        file, line = shard.origin[wrong[0]].tolist()
        takes = f"{most}" if least == most else f"{least} or {most}"
        raise DataError(
            f"{files[file]}:{line}: the row has {texts[wrong[0]]} texts and the objective takes {takes} (wrong in "
            f"{wrong.size} of the {len(texts)} rows of its shard); {fix}"
        )
    if parts.layout == "choices":
        longest = 2  # in a sequence
    special = spec.prefix + spec.suffix + parts.between * (longest - 1)
    if spec.sequence_length < special + longest:
        raise ConfigError(
            f"data.sequence_length {spec.sequence_length} leaves no cell for a token of each of {longest} texts beside "
            f"{special} special tokens; use at least {special + longest}"
        )


def filled(examples: Examples, spec: PackSpec) -> Int64:
    """How many cells of each example hold a token, special tokens included: int64 [B]."""
    parts, rows = _parts(spec), len(examples.key)
    pieces = np.bincount(examples.row, minlength=rows)
    tokens = np.bincount(examples.row, weights=examples.length, minlength=rows).astype(np.int64)
    return (
        tokens
        + parts.choices * (spec.prefix + spec.suffix)
        + parts.between * (pieces - parts.choices)
    )


def lengths(shard: ShardIndex) -> Int64:
    """The tokens of each text of D rows: int64 [D, most texts of a row], 0 where a row has fewer texts."""
    return _texts(shard)[1]


def _parts(spec: PackSpec) -> Parts:
    assert spec.parts is not None
    return spec.parts


def _texts(shard: ShardIndex) -> tuple[Int64, Int64]:
    """The first token of each text within its row, and its tokens: int64 [D, most texts], 0 where there is none."""
    first = np.cumsum(shard.length) - shard.length
    row = np.searchsorted(first + shard.length, shard.sentences, side="right")
    texts = np.bincount(row, minlength=len(first))
    number = ranges(np.zeros_like(texts), texts)
    begin = np.zeros((len(first), texts.max(initial=1)), dtype=np.int64)
    length = np.zeros_like(begin)
    begin[row, number] = shard.sentences - first[row]
    length[row, number] = np.diff(shard.sentences, append=shard.length.sum())
    return begin, length


def _cut(length: Int64, spec: PackSpec) -> Int64:
    """How many tokens of each text a sequence of all of them keeps: int64 [D, texts], as the argument is.

    What the loop of `_truncate_seq_pair` leaves has a closed form: all texts longer than some cap are cut to it, and of
    what cells that leaves free each of the first of these gets one.
    """
    most = length.shape[1]
    texts = (length > 0).sum(axis=1)
    room = spec.sequence_length - spec.prefix - spec.suffix - _parts(spec).between * (texts - 1)
    cap, left = np.full(len(length), -1), room.copy()
    for number, shortest in enumerate(
        np.sort(length, axis=1).T
    ):  # what fits a fair share leaves more to the others
        fair = left // (most - number)
        cap = np.where((cap < 0) & (shortest > fair), fair, cap)
        left -= np.where(cap < 0, shortest, 0)
    cap = np.where(cap < 0, length.max(axis=1, initial=0), cap)[:, None]
    kept: Int64 = np.minimum(length, cap)
    longer = length > cap
    kept += longer & (np.cumsum(longer, axis=1) <= (room - kept.sum(axis=1))[:, None])
    return kept


def _window_counts(length: Int64, spec: PackSpec) -> tuple[Int64, Int64, Int64, Int64]:
    """The windows of each row, the tokens of its first text and of a window, and those from one to the next: [D]."""
    parts = _parts(spec)
    room = spec.sequence_length - spec.prefix - spec.suffix
    has_two = (length > 0).sum(axis=1) > 1
    most = (
        room - parts.between - 1
        if parts.most is None
        else min(parts.most, room - parts.between - 1)
    )
    before = np.where(has_two, np.minimum(length[:, 0], most), 0)
    size = room - np.where(before > 0, before + parts.between, 0)
    step = size if parts.stride is None else np.minimum(size, parts.stride)
    last = length[np.arange(len(length)), has_two.astype(np.int64)]
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
    pieces = there.sum(axis=1)
    return PackPlan(
        example_start=np.concatenate(([0], np.cumsum(pieces))),
        document=np.repeat(row, pieces),
        begin=np.stack((begin[row, 0], begin[row, last] + offset), axis=1)[there],
        length=np.stack((first, window), axis=1)[there],
        column=np.stack((np.full(len(row), spec.prefix), behind), axis=1)[there],
    )
