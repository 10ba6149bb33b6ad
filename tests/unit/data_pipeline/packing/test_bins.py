"""Packing in two dimensions: nothing overlaps on either side, few examples are opened, and the key
only shuffles.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from data_pipeline.packing import bins
from data_pipeline.packing.documents import count_examples, plan
from samestep.examples import PackSpec, Sides


def sentences(pairs: int, seed: int = 0) -> np.ndarray:
    """Lengths of sentences and their translations: int64 [pairs, 2]."""
    random = np.random.default_rng(seed)
    source = np.clip(random.lognormal(3.2, 0.6, pairs), 1, 250)
    return (
        np.stack(
            (source, np.clip(source * random.lognormal(0, 0.25, pairs), 1, 250)), axis=1
        ).astype(np.int64)
        + 1
    )


def assert_no_overlap(
    example: np.ndarray, offset: np.ndarray, cost: np.ndarray, size: tuple[int, int]
) -> None:
    """On each side the pieces of an example lie end to end from its first position, inside it."""
    assert set(example.tolist()) == set(range(example.max(initial=-1) + 1))
    for side in (0, 1):
        order = np.lexsort((offset[:, side], example))
        ends = (offset + cost)[order, side]
        same = example[order][1:] == example[order][:-1]
        assert (offset[order, side][1:][same] == ends[:-1][same]).all()
        assert (offset[order, side][1:][~same] == 0).all()
        assert ends.max(initial=0) <= size[side]


@pytest.mark.parametrize("size", [(256, 256), (512, 260), (251, 600)], ids=str)
@pytest.mark.parametrize("pairs", [1, 2, 7, 3000])
def test_pieces_fit_without_overlap(size: tuple[int, int], pairs: int) -> None:
    cost = sentences(pairs)
    example, offset = bins.pack(cost, size, key=3)
    assert_no_overlap(example, offset, cost, size)
    assert bins.count(cost, size) == example.max() + 1


@pytest.mark.parametrize(
    "cost",
    [
        [],
        [[5, 9]],
        [[5, 9], [5, 9]],
        [[1, 1]] * 1000,
        [[5, 1]] * 9,
        [[1, 9]] * 9,
        [[5, 1], [1, 9]] * 5,
        [[2, 4]] * 7,
    ],
    ids=lambda cost: f"{len(cost)}x{cost[:1]}",
)
def test_hard_costs(cost: list[list[int]]) -> None:
    array = np.array(cost, dtype=np.int64).reshape(-1, 2)
    example, offset = bins.pack(array, (5, 9), 0)
    assert_no_overlap(example, offset, array, (5, 9))


def best_fit_one_by_one(cost: list[tuple[int, int]], size: tuple[int, int]) -> int:
    """The method of the module's docstring for one piece after the other.

    The first side is the scarcer one.
    """
    rooms: list[tuple[int, int]] = []
    for a, b in sorted(cost, reverse=True):
        fitting = [room for room in rooms if room[0] >= a and room[1] >= b]
        x, y = min(fitting, default=size)
        if fitting:
            rooms.remove((x, y))
        rooms.append((x - a, y - b))
    return len(rooms)


@pytest.mark.parametrize("seed", range(4))
def test_moving_groups_opens_about_as_many_as_one_by_one(seed: int) -> None:
    cost = np.random.default_rng(seed).integers(1, [25, 12], (600, 2))
    size = (48, 40)
    assert cost[:, 0].sum() / size[0] > cost[:, 1].sum() / size[1]
    expected = best_fit_one_by_one([(a, b) for a, b in cost.tolist()], size)
    assert bins.count(cost, size) == pytest.approx(expected, rel=0.01)


def test_examples_are_nearly_full_on_the_scarcer_side() -> None:
    cost = sentences(30_000)
    for size in ((256, 256), (512, 400)):
        least = (cost.sum(axis=0) / size).max()
        assert bins.count(cost, size) < 1.07 * least


def test_the_key_moves_pieces_and_nothing_else() -> None:
    cost = sentences(5000)
    first, again, other = (bins.pack(cost, (256, 256), key)[0] for key in (1, 1, 2))
    assert np.array_equal(first, again)
    assert first.max() == other.max()
    assert (first != other).mean() > 0.9
    longest = np.zeros(first.max() + 1)
    np.maximum.at(longest, first, cost[:, 0])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.1


def test_speed() -> None:
    cost = sentences(100_000)
    began = time.process_time()
    bins.pack(cost, (512, 512), 0)
    assert time.process_time() - began < 2  # measured: 0.3 s, and 1.5 s for a million


def test_pieces_of_documents_are_packed_into_both_sides() -> None:
    cost = np.stack((np.arange(1, 101) * 4 // 5 + 3, np.arange(1, 101) // 4 + 3), axis=1)
    spec = PackSpec(100, 0, 0, sides=Sides((83, 28), tuple(map(tuple, cost.tolist()))))
    lengths = np.random.default_rng(0).integers(0, 300, 500)
    packed = plan(lengths, spec, "best_fit", key=1)
    example = np.repeat(np.arange(packed.examples), np.diff(packed.example_start))
    used = np.stack([np.bincount(example, side) for side in cost[packed.length - 1].T], axis=1)
    assert (used <= (83, 28)).all()
    assert packed.length.sum() == lengths.sum()
    assert packed.examples == count_examples(lengths, spec, "best_fit")
    assert (packed.column[packed.example_start[:-1]] == 0).all()
