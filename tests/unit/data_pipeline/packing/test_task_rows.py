"""Packing of rows of a task: their texts are cut as by the loops of google-research/bert, and laid
out in order.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import task_rows
from data_pipeline.packing.policy import (
    check_policy,
    count_shard,
    needs_parts,
    packing_digest,
    plan_shard,
)
from samestep.errors import ConfigError, DataError
from samestep.examples import Examples, PackSpec, Parts
from samestep.tasks import TaskKind


def shard_of(rows: list[list[int]]) -> ShardIndex:
    """Rows of texts of these lengths; row i is of line i + 1."""
    texts = np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int64)
    total = np.array([sum(row) for row in rows], dtype=np.int64)
    origin = np.stack((np.zeros(len(rows)), np.arange(1, len(rows) + 1)), axis=1).astype(np.uint32)
    # Tokens lie in the file behind what comes before them: texts are not counted by that.
    return ShardIndex(64 + np.cumsum(total) - total, total, origin, np.cumsum(texts) - texts)


def random_rows(texts: tuple[int, ...], rows: int, longest: int) -> list[list[int]]:
    draw = np.random.default_rng(longest)
    return [
        draw.integers(1, longest, draw.choice(texts), endpoint=True).tolist() for _ in range(rows)
    ]


KINDS: dict[str, TaskKind] = {
    "joined": "classification",
    "windows": "tagging",
    "choices": "multiple_choice",
    "both_orders": "regression",
}


def spec_of(
    length: int, layout: str = "joined", prefix: int = 1, suffix: int = 1, **settings: Any
) -> PackSpec:
    if layout == "both_orders":
        settings |= {"choices": 2, "arrangement": "both_orders"}
    return PackSpec(length, prefix, suffix, parts=Parts(KINDS[layout], **settings))


class Piece(NamedTuple):
    """A piece, with its first token counted through the row."""

    document: int
    begin: int
    length: int
    column: int


def examples_of(rows: list[list[int]], spec: PackSpec) -> list[list[Piece]]:
    """The pieces of each example, which the counting agrees with and which lie where they may."""
    shard = shard_of(rows)
    packed = plan_shard(shard, spec, "padded")
    assert packed.examples == count_shard(shard, spec, "padded", 0, ["a"])
    columns = (packed.document, packed.begin, packed.length, packed.column)
    assert {column.dtype for column in (*columns, packed.example_start)} == {np.dtype(np.int64)}
    pieces = [Piece(*piece) for piece in np.stack(columns, axis=1).tolist()]
    return [pieces[first:end] for first, end in itertools.pairwise(packed.example_start.tolist())]


def truncated(lengths: list[int], room: int) -> list[int]:
    """`_truncate_seq_pair` of google-research/bert, for any number of texts."""
    lengths = list(lengths)
    while sum(lengths) > room:
        longest = max(range(len(lengths)), key=lambda i: (lengths[i], i))
        lengths[longest] -= 1
    return lengths


@pytest.mark.parametrize("texts", [(1,), (2,), (1, 2), (1, 2, 3, 5)])
@pytest.mark.parametrize(
    ("length", "prefix", "suffix", "between"), [(24, 1, 1, 1), (31, 1, 1, 2), (18, 0, 1, 1)]
)
def test_joined_texts_are_cut_one_token_at_a_time_from_the_longest(
    texts, length, prefix, suffix, between
):
    rows = random_rows(texts, 400, longest=20)
    examples = examples_of(rows, spec_of(length, prefix=prefix, suffix=suffix, between=between))
    assert len(examples) == len(rows)
    for number, (row, pieces) in enumerate(zip(rows, examples, strict=True)):
        begin = np.cumsum(row) - row
        kept = truncated(row, length - prefix - suffix - between * (len(row) - 1))
        column = prefix + np.cumsum(kept) - kept + between * np.arange(len(row))
        assert pieces == [Piece(number, *piece) for piece in zip(begin, kept, column, strict=True)]
        assert pieces[-1].column + pieces[-1].length + suffix <= length


def test_rows_that_fit_keep_every_token_once():
    rows = random_rows((1, 2, 3), 300, longest=9)
    for layout in ("joined", "windows"):
        fitting = [row for row in rows if len(row) < 3] if layout == "windows" else rows
        for row, pieces in zip(fitting, examples_of(fitting, spec_of(64, layout)), strict=True):
            kept = np.concatenate(
                [np.arange(piece.begin, piece.begin + piece.length) for piece in pieces]
            )
            assert kept.tolist() == list(range(sum(row)))
            assert [piece.length for piece in pieces] == row


def doc_spans(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """The (start, length) of windows, by the loop of run_squad.py of google-research/bert."""
    spans, start = [], 0
    while start < tokens:
        length = min(tokens - start, room)
        spans.append((start, length))
        if start + length == tokens:
            break
        start += min(length, stride)
    return spans


@pytest.mark.parametrize("stride", [None, 1, 5, 100])
@pytest.mark.parametrize("most", [None, 4, 100])
@pytest.mark.parametrize("texts", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("between", [1, 2])
def test_windows_are_those_of_run_squad(stride, most, texts, between):
    rows, length = random_rows(texts, 120, longest=40), 24
    examples = iter(
        examples_of(rows, spec_of(length, "windows", between=between, stride=stride, most=most))
    )
    for number, row in enumerate(rows):
        # A question that would leave nothing for its text is cut even if no limit is set.
        first = min(row[0], most or row[0], length - 2 - between - 1) if len(row) == 2 else 0
        room = length - 2 - (first + between if first else 0)
        question = [Piece(number, 0, first, 1)] * (first > 0)
        column = 1 + (first + between if first else 0)
        for start, size in doc_spans(row[-1], room, stride or room):
            window = Piece(number, row[0] * (len(row) - 1) + start, size, column)
            assert next(examples) == [*question, window]
            assert column + size + 1 <= length
    assert next(examples, None) is None


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_choices_repeat_the_first_text_side_by_side(choices):
    rows, length = random_rows((1 + choices,), 200, longest=20), 24
    spec = spec_of(length, "choices", choices=choices)
    assert spec.positions == choices * length
    for number, (row, pieces) in enumerate(zip(rows, examples_of(rows, spec), strict=True)):
        begin = np.cumsum(row) - row
        expected = []
        for choice in range(choices):
            first, second = truncated([row[0], row[1 + choice]], length - 3)
            at = choice * length + 1
            expected += [
                (number, 0, first, at),
                (number, begin[1 + choice], second, at + first + 1),
            ]
        assert pieces == expected


@pytest.mark.parametrize("between", [1, 2])
def test_both_orders_of_two_texts_are_side_by_side(between):
    rows, length = random_rows((2,), 200, longest=20), 24
    spec = spec_of(length, "both_orders", between=between)
    assert spec.positions == 2 * length
    for number, (row, pieces) in enumerate(zip(rows, examples_of(rows, spec), strict=True)):
        expected = []
        for order, (begin, lengths) in enumerate((((0, row[0]), row), ((row[0], 0), row[::-1]))):
            first, second = truncated(lengths, length - 2 - between)
            at = order * length + 1
            expected += [
                (number, begin[0], first, at),
                (number, begin[1], second, at + first + between),
            ]
        assert pieces == expected


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(24, between=2),
        spec_of(24, "windows", stride=3, most=5),
        spec_of(24, "choices", choices=2),
        spec_of(24, "both_orders", between=2),
    ],
    ids=lambda spec: spec.parts.layout,
)
def test_filled_positions_are_those_of_texts_and_special_tokens(spec):
    texts = {"choices": (3,), "both_orders": (2,)}.get(spec.parts.layout, (1, 2))
    rows = random_rows(texts, 50, longest=20)
    packed = plan_shard(shard_of(rows), spec, "padded")
    pieces = np.diff(packed.example_start)
    row = np.repeat(np.arange(packed.examples), pieces)
    zeros = np.zeros(packed.examples)
    examples = Examples(np.zeros(0), row, packed.column, packed.length, zeros, zeros, False)
    filled_positions = np.zeros((packed.examples, spec.positions + spec.parts.between), dtype=bool)
    for number, column, length in zip(row, packed.column, packed.length, strict=True):
        after = (
            spec.parts.between
            if (column + length + spec.parts.between) in packed.column[row == number]
            else 1
        )
        filled_positions[
            number, column - (column % spec.sequence_length == 1) : column + length + after
        ] = True
    assert task_rows.filled(examples, spec).tolist() == filled_positions.sum(axis=1).tolist()


@pytest.mark.parametrize(
    ("rows", "spec", "words"),
    [
        (
            [[3, 4], [3, 4, 5]],
            spec_of(24, "windows"),
            ["c.jsonl:2: ", "has 3 texts and", "reads 1 or 2", "1 of the 2"],
        ),
        (
            [[3, 4, 5], [3, 4], [1]],
            spec_of(24, "choices", choices=2),
            [
                "c.jsonl:2: ",
                "has 2 texts and",
                "reads 3 ",
                "2 of the 3 rows",
                "set objective.choices",
            ],
        ),
        (
            [[3, 4], [3]],
            spec_of(24, "both_orders"),
            ["c.jsonl:2: ", "has 1 texts and", "reads 2 ", "set objective.both_orders to false"],
        ),
    ],
)
def test_a_row_of_another_number_of_texts_is_named(rows, spec, words):
    with pytest.raises(DataError) as error:
        count_shard(shard_of(rows), spec, "padded", 0, ["c.jsonl"])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("row", "least", "settings"),
    [
        ([9], 3, {}),
        ([9, 9], 5, {}),
        ([9, 9, 9], 7, {}),
        ([9, 9, 9], 9, {"between": 2}),
        ([9, 9], 5, {"layout": "windows"}),
        ([9, 9, 9], 5, {"layout": "choices", "choices": 2}),
    ],
)
def test_a_length_without_room_for_a_token_of_each_text_is_refused(row, least, settings):
    with pytest.raises(
        ConfigError,
        match=rf"data.sequence_length is {least - 1}, .* use at least {least}",
    ):
        count_shard(shard_of([row]), spec_of(least - 1, **settings), "padded", 0, ["a"])
    for pieces in examples_of([row], spec_of(least, **settings)):
        assert {piece.length for piece in pieces} == {1}


def test_the_digest_tells_apart_all_that_changes_examples_and_is_what_it_was_without_parts():
    changes = [{}, {"between": 2}, {"layout": "windows"}, {"layout": "windows", "stride": 3}]
    changes += [
        {"layout": "windows", "most": 3},
        *({"layout": "choices", "choices": n} for n in (2, 3)),
    ]
    specs = [spec_of(24, **settings) for settings in changes] + [spec_of(25), PackSpec(24, 1, 1)]
    assert len({packing_digest(spec, "padded") for spec in specs}) == len(specs)
    assert packing_digest(PackSpec(128, 1, 1), "concat").startswith("730af8f30b81d20c")


@pytest.mark.parametrize(
    ("parts_of_row", "digest"),
    [
        (Parts("classification"), "3ca19fb364f7b8d6785164eaa9525a13"),
        (Parts("regression", between=2), "19b5e311e6a44127668098a68e5baddaa"),
        (Parts("multiple_choice", choices=4), "68a3c74a8d890eca66ef8866721a8845"),
        (Parts("tagging"), "ef6fe5ab269d13b7f0ececb9d69863f6"),
        (Parts("question_answering", stride=128, most=64), "4b49d8870713422d2a1ca0bc0c2581dc"),
    ],
)
def test_the_digest_has_not_changed_since_kinds_had_other_names(parts_of_row, digest):
    assert packing_digest(PackSpec(128, 1, 1, parts=parts_of_row), "padded").startswith(digest)


def manifest_of(kind: str | None) -> Manifest:
    settings = {} if kind is None else {"task": {"target": kind, "labels": []}}
    return Manifest(FORMAT, "none", 1, "uint16", {}, ("a",), 1, {}, {}, settings)


def test_the_objective_and_the_dataset_must_be_of_the_same_task():
    spec = spec_of(24)
    assert needs_parts(spec, "padded")
    check_policy(manifest_of("classification"), "data", spec, "padded")
    with pytest.raises(ConfigError, match=r"data.packing is concat, .*; use data.packing=padded"):
        check_policy(manifest_of("classification"), "data", spec, "concat")
    with pytest.raises(
        DataError, match=r"reads rows for classification, and data holds documents without labels"
    ):
        check_policy(manifest_of(None), "data", spec, "padded")
    with pytest.raises(
        DataError,
        match=r"and data holds rows for tagging; use the objective tagging, or set data.path",
    ):
        check_policy(manifest_of("tagging"), "data", spec, "padded")
    for policy in ("concat", "best_fit", "padded"):  # pre-training on the texts of rows
        check_policy(manifest_of("tagging"), "data", PackSpec(24, 1, 1), policy)


def test_planning_takes_no_loop_over_rows():
    draw = np.random.default_rng(0)
    texts = draw.integers(1, 400, 400_000)
    total = texts.reshape(-1, 2).sum(axis=1)
    shard = ShardIndex(
        np.cumsum(total) - total, total, np.zeros((len(total), 2)), np.cumsum(texts) - texts
    )
    begin = time.perf_counter()
    for spec in (spec_of(128), spec_of(384, "windows", stride=128, most=64)):
        assert task_rows.count_examples(shard, spec) == task_rows.plan(shard, spec).examples
    assert time.perf_counter() - begin < 8  # 0.3 s
