"""Counting examples by their names finds an order that is wrong itself, which making the batches
again cannot.
"""

from __future__ import annotations

import numpy as np

from trainer.inspect.audit.tally import Tally

LANES, SIZE = 4, 20


def tally(epoch: np.ndarray, example: np.ndarray, excluded: tuple[int, ...] = ()) -> Tally:
    """Of a run that was fed these examples, once each, in two parts."""
    found = Tally(SIZE, LANES)
    number = np.arange(len(example))
    for part in np.array_split(number, 2):
        left_out = np.isin(part, excluded)
        columns = {"number": part, "epoch": epoch[part], "example": example[part]}
        found.add(columns, np.where(left_out, 0, 1), left_out)
    return found


def passes(count: int) -> tuple[np.ndarray, np.ndarray]:
    number = np.arange(count)
    return number // SIZE, number * 7 % SIZE


def test_a_pass_is_over_when_all_lanes_have_left_it_or_nothing_is_left() -> None:
    epoch, example = passes(2 * SIZE)
    assert [tally(epoch[:n], example[:n]).is_over(0) for n in (1, SIZE - 1, SIZE, SIZE + 1)] == [
        False,
        False,
        True,
        True,
    ]
    example[5] = example[
        6
    ]  # now one is missing, which shows when the last lane is in the next pass
    ends = [
        tally(epoch[:n], example[:n]).is_over(0) for n in (SIZE, SIZE + LANES - 1, SIZE + LANES)
    ]
    assert ends == [False, False, True]


def test_a_pass_in_groups_by_source_is_over_when_the_source_s_lanes_have_left_it() -> None:
    """Every second group of 3 examples is another source's."""
    epoch, example = passes(2 * SIZE)
    example[5] = example[6]
    own = np.arange(2 * SIZE)
    number, ends = own // 3 * 6 + own % 3, []
    for count in (SIZE + LANES - 1, SIZE + LANES):
        found = Tally(SIZE, LANES, own_numbers=True)
        for part in np.array_split(own[:count], 2):
            columns = {"number": number[part], "epoch": epoch[part], "example": example[part]}
            found.add(columns, np.ones_like(part), np.zeros(len(part), dtype=np.bool_))
        ends.append(found.is_over(0))
    assert ends == [False, True]


def test_a_pass_in_groups_by_length_is_over_when_a_pool_has_none_of_it() -> None:
    """Pools of 30 examples, in any order: nothing counts as lost that is yet to come."""
    epoch, example = passes(6 * SIZE)
    draw = np.random.default_rng(0)
    arranged = np.concatenate([first + draw.permutation(30) for first in range(0, 6 * SIZE, 30)])

    def over(example: np.ndarray, count: int) -> list[bool]:
        found = Tally(SIZE, LANES, pool=30)
        for number in np.array_split(np.arange(count), 7):
            at = arranged[number]
            columns = {"number": number, "epoch": epoch[at], "example": example[at]}
            found.add(columns, np.ones(len(at), dtype=np.int64), np.zeros(len(at), dtype=np.bool_))
        return [found.is_over(each) for each in sorted(found.passes)]

    for count in range(8, 6 * SIZE + 1):
        complete = [
            np.sum(epoch[arranged[:count]] == each) == SIZE
            for each in np.unique(epoch[arranged[:count]])
        ]
        assert over(example, count) == complete
    example[5] = example[
        6
    ]  # one is missing, which shows when a pool with no other of its pass is complete
    assert [over(example, count)[0] for count in (30, 60, 61)] == [False, False, True]


def test_lost_and_repeated_examples_are_counted_in_their_pass() -> None:
    epoch, example = passes(3 * SIZE)
    example[SIZE + 3] = example[SIZE + 15]
    counts = [
        (each.consumed, each.missing, each.repeated)
        for each in tally(epoch, example).passes.values()
    ]
    assert counts == [(SIZE, 0, 0), (SIZE - 1, 1, 1), (SIZE, 0, 0)]


def test_excluded_examples_are_not_lost() -> None:
    first, second = tally(*passes(2 * SIZE), excluded=(2, 30)).passes.values()
    assert (first.consumed, first.excluded, first.missing) == (SIZE - 1, 1, 0)
    assert (second.consumed, second.excluded, second.missing) == (SIZE - 1, 1, 0)
