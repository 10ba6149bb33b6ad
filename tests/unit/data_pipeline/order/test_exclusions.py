"""A run that passes over examples gets the batches of one that did so from the start, whenever it
learns of them.
"""

from typing import Any

import numpy as np
import pytest

from data_pipeline.order.exclusions import Exclusions, global_number, merged
from data_pipeline.reading.config import Config
from samestep.errors import ConfigError, DataError
from tests.unit.data_pipeline.loaders import (
    Rows,
    assert_same,
    global_batches,
    make_loader,
    valid_rows,
)

RANGES = [(0, 3), (30, 40), (40, 41), (100, 140), (200, 201)]


def numbers(batches: list[Rows]) -> list[int]:
    return sorted(number for rows in batches for number in rows["number"].tolist())


@pytest.mark.parametrize("ranges", [[], [(0, 1)], RANGES, [(5, 9), (7, 30), (2, 6)]])
def test_numbers_are_those_of_a_list_without_the_excluded_ones(
    ranges: list[tuple[int, int]],
) -> None:
    excluded, gone = Exclusions(ranges), {number for part in ranges for number in range(*part)}
    left = [number for number in range(400) if number not in gone]
    for start in range(0, 210, 7):
        expected = [number for number in left if number >= start][:30]
        assert excluded.take(start, 30).tolist() == expected
        assert excluded.after(start, 30) == expected[-1] + 1
        assert excluded.before(start) == len([number for number in gone if number < start])
        kept = excluded.kept(start, start + 50)
        assert np.concatenate([[], *(range(*part) for part in kept)]).tolist() == [
            n for n in left if 0 <= n - start < 50
        ]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_without_the_excluded_examples(
    write_dataset: Any, count: int, threads: int
) -> None:
    batches = global_batches(write_dataset(), 12, count, exclude=tuple(RANGES), threads=threads)
    assert all(len(rows["number"]) == 24 for rows in batches)
    gone = {number for part in RANGES for number in range(*part)}
    assert numbers(batches) == [n for n in range(400) if n not in gone][: 12 * 24]
    whole = {
        n: row
        for rows in global_batches(write_dataset(), 20)
        for n, row in zip(rows["number"].tolist(), rows["digest"].tolist(), strict=True)
    }
    assert all(
        whole[n] == d
        for rows in batches
        for n, d in zip(rows["number"].tolist(), rows["digest"].tolist(), strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_step_is_taken_again_with_the_examples_that_follow(
    write_dataset: Any, count: int, threads: int
) -> None:
    """Steps 3, 4 and its second try are faulty.

    Later ones are excluded as well, and the run is cut in between.
    """
    folder, replicas = write_dataset(), []
    for index in range(count):
        loader = make_loader(folder, index, count, threads=threads)
        taken: list[Rows] = []
        for attempt in range(12):
            if attempt == 6:
                state = loader.state_dict()
                assert state["example"] == len(taken) * 24
                loader.close()
                loader = make_loader(folder, index, count, threads=threads)
                loader.load_state_dict(state)
                loader.exclude(200, 230)
            rows = valid_rows(next(loader))
            if attempt in (3, 4, 5):
                for first, end in loader.consumed:
                    loader.exclude(first, end)
                assert loader.consumed == []
            else:
                taken.append(rows)
        loader.close()
        replicas.append(taken)
        ranges = tuple(tuple(part) for part in loader.state_dict()["excluded"])
    assert ranges == ((72, 144), (200, 230))
    expected = [valid for index in range(count) for valid in _alone(folder, index, count, ranges)]
    assert_same(expected, [rows for taken in replicas for rows in taken])


def _alone(folder: Any, index: int, count: int, ranges: tuple[tuple[int, ...], ...]) -> list[Rows]:
    with make_loader(folder, index, count, exclude=ranges) as loader:
        return [valid_rows(next(loader)) for _ in range(9)]


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5, 9])
def test_resuming_before_inside_and_after_an_excluded_range(write_dataset: Any, steps: int) -> None:
    folder = write_dataset()
    whole = global_batches(folder, 12, exclude=tuple(RANGES))
    with make_loader(folder, exclude=tuple(RANGES)) as loader:
        for _ in range(steps):
            next(loader)
        state = loader.state_dict()
    assert_same(whole[steps:], global_batches(folder, 12 - steps, 3, state=state))
    assert_same(
        whole[steps:], global_batches(folder, 12 - steps, 2, state=state, exclude=tuple(RANGES))
    )


def test_the_examples_of_a_step_are_told(write_dataset: Any) -> None:
    with make_loader(write_dataset(), exclude=tuple(RANGES), threads=1) as loader:
        assert loader.consumed == []
        next(loader)
        assert loader.consumed == [[3, 27]]
        rows = valid_rows(next(loader))
        assert loader.consumed == [[27, 30], [41, 62]]
        assert sorted(rows["number"].tolist()) == [*range(27, 30), *range(41, 62)]


def test_exclusions_that_come_too_late_are_refused(write_dataset: Any) -> None:
    folder = write_dataset()
    with make_loader(folder) as loader:
        next(loader)
        state = loader.state_dict()
    with pytest.raises(
        DataError,
        match=r"data.exclude \[\[23, 24\]\] has examples before 24, which .*older checkpoint",
    ):
        make_loader(folder, exclude=((23, 24),)).load_state_dict(state)
    make_loader(folder, exclude=((24, 25),)).load_state_dict(state)


@pytest.mark.parametrize("part", [(3,), (3, 3), (-1, 3), (1, 2, 3)])
def test_impossible_ranges_are_refused(part: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"exclude has \[.*Use pairs"):
        Config(path="x", exclude=(part,))


def test_evaluation_excludes_nothing(write_dataset: Any) -> None:
    folder = write_dataset(heldout=2)
    first, second = (
        [
            valid_rows(step)
            for step in make_loader(folder, split="heldout", finite=True, exclude=exclude)
        ]
        for exclude in ((), ((0, 30),))
    )
    assert_same(first, second)


def test_global_number_skips_excluded_examples() -> None:
    excluded = [[2, 4], [5, 7], [20, 30]]
    kept = [
        number for number in range(40) if not any(first <= number < end for first, end in excluded)
    ]
    assert [global_number(taken, excluded) for taken in range(len(kept))] == kept


def test_merged_ranges_are_in_order_and_apart() -> None:
    assert merged([(7, 9), (1, 3), (3, 5), (8, 12), (2, 4)]) == [[1, 5], [7, 12]]
