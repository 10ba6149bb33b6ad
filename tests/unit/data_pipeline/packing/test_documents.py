"""Packing loses no token, overlaps no positions and depends on its arguments only."""

import time

import numpy as np
import pytest

from data_pipeline.packing import PackPlan, ranges
from data_pipeline.packing.documents import count_examples, plan
from samestep.errors import ConfigError
from samestep.examples import Examples, PackSpec, Vocabulary
from trainer.objectives.kinds import mlm

POLICIES = ("concat", "padded", "best_fit")


def assert_valid(packed: PackPlan, lengths: np.ndarray, spec: PackSpec, policy: str) -> None:
    """Every token is in exactly one chunk, and no two chunks overlap."""
    covered = np.zeros(int(lengths.sum()), dtype=int)
    document_start = np.cumsum(lengths) - lengths
    np.add.at(covered, ranges(document_start[packed.document] + packed.begin, packed.length), 1)
    assert (covered == 1).all()
    assert (packed.length >= 1).all()
    assert (packed.begin + packed.length <= lengths[packed.document]).all()

    pieces = np.diff(packed.example_start)
    assert (pieces >= 1).all()
    example = np.repeat(np.arange(packed.examples), pieces)
    assert len(example) == len(packed.document)
    prefix = np.full(len(example), spec.prefix)
    if policy == "concat":  # one prefix for the whole row
        prefix[1:][example[1:] == example[:-1]] = 0
    first_cell, end = packed.column - prefix, packed.column + packed.length + spec.suffix
    assert (first_cell >= 0).all()
    assert (end <= spec.sequence_length).all()
    same_row = example[1:] == example[:-1]
    # From the first position of a row to its last token there is no hole: objectives rely on that.
    assert (first_cell[1:][same_row] == end[:-1][same_row]).all()
    assert (first_cell[packed.example_start[:-1]] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "spec",
    [
        PackSpec(3, 1, 1),
        PackSpec(4, 1, 1),
        PackSpec(16, 1, 1),
        PackSpec(9, 0, 1),
        PackSpec(7, 0, 0),
        PackSpec(12, 2, 3),
        PackSpec(512, 1, 1),
    ],
    ids=str,
)
def test_every_token_is_in_exactly_one_piece(policy: str, spec: PackSpec) -> None:
    random = np.random.default_rng(spec.sequence_length)
    for documents in (1, 2, 7, 300):
        lengths = np.maximum(0, random.lognormal(2, 2, documents)).astype(np.int64)
        packed = plan(lengths, spec, policy, key=5)
        assert_valid(packed, lengths, spec, policy)
        assert packed.examples == count_examples(lengths, spec, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [0, 0, 1],
        [14],
        [15],
        [13, 14, 15],
        [100_000],
        [1] * 1000,
        [14] * 50,
        [13] * 50,
        [0, 5, 0, 0, 28, 0],
    ],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
def test_hard_lengths(policy: str, lengths: list[int]) -> None:
    spec = PackSpec(16, 1, 1)
    packed = plan(lengths, spec, policy)
    assert_valid(packed, np.array(lengths), spec, policy)
    assert packed.examples == count_examples(lengths, spec, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_text_gives_no_examples(policy: str, lengths: list[int]) -> None:
    assert plan(lengths, PackSpec(16, 1, 1), policy).examples == 0
    assert count_examples(lengths, PackSpec(16, 1, 1), policy) == 0


def test_concat_fills_every_window_but_the_last() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    packed = plan(lengths, PackSpec(32, 1, 1), "concat")
    positions = lengths.sum() + len(lengths) - 1
    assert packed.examples == -(-positions // 30)
    last_cell = (packed.column + packed.length)[packed.example_start[1:] - 1]
    # A window may end, or have begun, in the separator between two documents: a position of padding
    # each, never more.
    assert (last_cell[:-1] >= 29).all()
    assert (31 - last_cell[:-1]).mean() < 0.1


def test_concat_by_hand() -> None:
    packed = plan(
        [3, 0, 5, 4], PackSpec(8, 1, 1), "concat"
    )  # positions aaa|bbb bb|cccc, "|" a separator, windows of 6
    assert packed.document.tolist() == [0, 2, 2, 3, 3]
    assert packed.begin.tolist() == [0, 0, 2, 0, 2]
    rows = [
        slice(a, b)
        for a, b in zip(packed.example_start[:-1], packed.example_start[1:], strict=True)
    ]
    assert [packed.document[row].tolist() for row in rows] == [[0, 2], [2, 3], [3]]
    assert [packed.column[row].tolist() for row in rows] == [[1, 5], [1, 5], [1]]
    assert [packed.length[row].tolist() for row in rows] == [[3, 2], [3, 2], [2]]


def test_concat_drops_a_separator_that_would_begin_a_row() -> None:
    packed = plan(
        [8, 5, 3], PackSpec(10, 1, 1), "concat"
    )  # the first document fills the first window
    assert packed.column.tolist() == [1, 1, 7, 1]
    assert packed.length.tolist() == [8, 5, 1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_cell_that_is_attended_to_is_padding(policy: str) -> None:
    pad, cls, sep, mask = range(4)
    objective = mlm.Config(replace_random=0.0).build(
        Vocabulary(10, pad, cls, sep, mask, (pad, cls, sep, mask))
    )
    for length in (4, 10, 16):
        spec = objective.pack_spec(length)
        lengths = np.random.default_rng(length).integers(1, 2 * length, 300)
        packed = plan(lengths, spec, policy)
        examples = Examples(
            tokens=np.full(lengths.sum(), 7, dtype=np.int32),
            row=np.repeat(np.arange(packed.examples), np.diff(packed.example_start)),
            column=packed.column,
            length=packed.length,
            key=np.arange(packed.examples, dtype=np.uint64),
            weight=np.ones(packed.examples, dtype=np.float32),
            isolated=policy != "concat",
        )
        batch = objective.collate(examples, length)
        tokens, segments = batch["tokens"], batch["segments"]
        assert ((tokens == pad) == (segments == 0)).all()
        assert (tokens == cls).sum() == (
            packed.examples if policy == "concat" else len(packed.document)
        )
        assert (tokens == sep).sum() == len(packed.document)
        assert (tokens[:, 1] > sep).all()


def test_padded_has_one_piece_an_example() -> None:
    packed = plan([3, 20, 6], PackSpec(8, 1, 1), "padded")
    assert packed.examples == len(packed.document) == 1 + 4 + 1
    assert packed.length.tolist() == [3, 6, 6, 6, 2, 6]
    assert (packed.column == 1).all()


def best_fit_one_by_one(costs: list[int], size: int) -> int:
    """Textbook best-fit-decreasing: how many bins it opens."""
    rooms: list[int] = []
    for cost in sorted(costs, reverse=True):
        fitting = [room for room in rooms if room >= cost]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - cost)
        else:
            rooms.append(size - cost)
    return len(rooms)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_best_fit_decreasing(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 31, 400)
    packed = plan(lengths, PackSpec(32, 1, 1), "best_fit", key=seed)
    assert packed.examples == best_fit_one_by_one((lengths + 2).tolist(), 32)


def test_best_fit_is_nearly_full_and_cuts_no_short_document() -> None:
    lengths = np.random.default_rng(0).integers(5, 400, 20_000)
    packed = plan(lengths, PackSpec(512, 1, 1), "best_fit")
    assert len(packed.document) == len(lengths)
    assert (lengths + 2).sum() / (packed.examples * 512) > 0.99


def test_the_key_moves_pieces_and_nothing_else() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 2000)
    first, again, other = (plan(lengths, PackSpec(64, 1, 1), "best_fit", key) for key in (1, 1, 2))
    assert (first.document == again.document).all()
    assert first.examples == other.examples
    assert (first.document != other.document).mean() > 0.9


def test_the_order_of_best_fit_examples_says_nothing_of_their_lengths() -> None:
    lengths = np.random.default_rng(2).integers(1, 126, 50_000)
    packed = plan(lengths, PackSpec(128, 1, 1), "best_fit")
    longest = np.maximum.reduceat(packed.length, packed.example_start[:-1])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.03


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spec", [PackSpec(2, 1, 1), PackSpec(1, 0, 1)], ids=str)
def test_no_room_for_text_is_refused(policy: str, spec: PackSpec) -> None:
    with pytest.raises(ConfigError, match=f"use at least {spec.prefix + spec.suffix + 1}"):
        plan([5], spec, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_counting_is_much_cheaper_than_planning(policy: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 200_000)
    seconds = []
    for function in (plan, count_examples):
        begin = time.process_time()
        for _ in range(3):
            function(lengths, PackSpec(128, 1, 1), policy)
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 0.6 * seconds[0], seconds


@pytest.mark.parametrize(
    ("policy", "documents"), [("concat", 500_000), ("padded", 500_000), ("best_fit", 50_000)]
)
def test_speed(policy: str, documents: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, documents)
    begin = time.process_time()
    plan(lengths, PackSpec(128, 1, 1), policy)
    assert (
        time.process_time() - begin < 3
    )  # measured: 0.2 s; a Python loop over documents would take longer


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
