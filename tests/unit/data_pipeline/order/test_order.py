"""The order visits every example once per epoch, is the same at any number of replicas, mixes, and
never changes.
"""

from collections import OrderedDict

import numpy as np
import pytest

from data_pipeline.order.example_order import Order, SinglePass, permute, share
from samestep.errors import ConfigError
from samestep.hashing import combine


def ids(counts: list[int], order: Order | SinglePass, number: np.ndarray) -> np.ndarray:
    at = order.locate(number)
    assert (at.index >= 0).all()
    assert (at.index < np.asarray(counts)[at.shard]).all()
    return (np.cumsum(counts) - counts)[at.shard] + at.index


@pytest.mark.parametrize("lanes", [1, 2, 7, 64])
@pytest.mark.parametrize(
    "counts",
    [[64], [1] * 64, [100, 0, 1, 0, 300], [7] * 11, [997, 3, 0], [5000]],
    ids=lambda c: f"{len(c)}x{max(c)}",
)
def test_every_epoch_has_every_example_once(counts: list[int], lanes: int) -> None:
    total, epochs = sum(counts), 4
    order = Order(counts, seed=3, lanes=lanes)
    # Lanes differ by one example, so enough numbers to finish `epochs` passes of the longest lane.
    number = np.arange(lanes * (-(-total // lanes)) * epochs)
    example, epoch = ids(counts, order, number), order.locate(number).epoch
    for e in range(epochs):
        assert sorted(example[epoch == e]) == list(range(total))


def test_no_gap_and_no_repeat_at_any_point_within_a_lane() -> None:
    counts = [13, 40, 1, 22]
    order = Order(counts, seed=0, lanes=5)
    number = np.arange(5000)
    at = order.locate(number)
    for lane in range(5):
        epoch = at.epoch[number % 5 == lane]
        assert (np.diff(epoch) >= 0).all()
        assert (np.diff(epoch) <= 1).all()
        example = ids(counts, order, number[number % 5 == lane])
        assert len(set(zip(epoch.tolist(), example.tolist(), strict=True))) == len(example)


@pytest.mark.parametrize("start", [0, 1, 1000, 12_345])
@pytest.mark.parametrize("size", [1, 5, 64, 100, 257])
def test_replicas_share_a_batch_without_gap_or_overlap(start: int, size: int) -> None:
    batch = Order([300, 200, 77], seed=1, lanes=64).batch(start, size)
    assert sorted(batch) == list(range(start, start + size))
    for count in (1, 2, 3, 4, 5, 64):
        shares = [batch[share(size, index, count)] for index in range(count)]
        assert np.concatenate(shares).tolist() == batch.tolist()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_place_does_not_depend_on_what_else_is_asked_for() -> None:
    order = Order([50, 60, 70], seed=1, lanes=8)
    together = order.locate(np.arange(1000))
    for n in (0, 1, 179, 180, 999):
        alone = order.locate([n])
        assert (alone.epoch[0], alone.shard[0], alone.index[0]) == (
            together.epoch[n],
            together.shard[n],
            together.index[n],
        )


def test_golden_values() -> None:
    """If this fails, the order of every run changed.

    Raise ORDER_VERSION, so that checkpoints are not continued.
    """
    order = Order([100, 50, 0, 200, 7, 33, 120, 90], seed=42, lanes=16, window=2)
    at = order.locate([0, 1, 2, 17, 100, 599, 600, 601, 6000, 10**9])
    assert at.epoch.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 9, 1644736]
    assert at.shard.tolist() == [0, 0, 0, 0, 1, 6, 0, 0, 1, 5]
    assert at.index.tolist() == [30, 53, 87, 49, 36, 92, 21, 70, 23, 14]
    assert order.batch(30, 8).tolist() == [32, 33, 34, 35, 36, 37, 30, 31]
    assert permute(np.arange(10), np.full(10, 10), combine(7, np.zeros(10))).tolist() == [
        8,
        5,
        3,
        7,
        0,
        6,
        2,
        4,
        9,
        1,
    ]


def test_a_replica_stays_with_few_shards() -> None:
    shards, lanes, replicas, batch_size = 256, 64, 8, 256
    order = Order([1000] * shards, seed=0, lanes=lanes, window=4)
    touched: set[int] = set()
    for step in range(60):  # about a quarter of each lane's span
        batch = order.batch(step * batch_size, batch_size)[share(batch_size, 3, replicas)]
        touched |= set(order.locate(batch).shard.tolist())
    assert len(touched) <= lanes // replicas * 5  # a window of 4 shards overlaps 5


def test_epochs_are_shuffled_differently() -> None:
    counts = [500] * 20
    order = Order(counts, seed=0, lanes=10)
    example = ids(counts, order, np.arange(20_000))
    assert (example[:10_000] != example[10_000:]).mean() > 0.99


def test_seeds_are_shuffled_differently() -> None:
    counts = [500] * 20
    first, second = (
        ids(counts, Order(counts, seed=seed, lanes=10), np.arange(10_000)) for seed in (0, 1)
    )
    assert (first != second).mean() > 0.99


def test_a_window_is_well_mixed() -> None:
    """Within a window of one lane, where an example ends up is uniform over the window
    (chi-square).
    """
    size, cells, trials = 3000, 10, 300
    observed = np.zeros((cells, cells))
    for seed in range(trials // 10):
        place = permute(np.arange(size), np.full(size, size), combine(seed, np.zeros(size)))
        np.add.at(observed, (np.arange(size) * cells // size, place * cells // size), 1)
    expected = observed.sum() / cells**2
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 130  # 81 degrees of freedom: mean 81, standard deviation 12.7


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10, 63, 64, 65, 1000, 4097])
def test_permute_is_a_bijection(size: int) -> None:
    for key in range(20):
        place = permute(np.arange(size), np.full(size, size), combine(key, np.zeros(size)))
        assert sorted(place) == list(range(size))


def test_permute_scatters_neighbors() -> None:
    size = 10_000
    place = permute(np.arange(size), np.full(size, size), combine(1, np.zeros(size)))
    steps = np.abs(np.diff(place))
    assert abs(steps.mean() / (size / 3) - 1) < 0.05  # the mean distance of two random points
    assert (steps == 1).mean() < 0.002


def test_huge_datasets_do_not_overflow() -> None:
    counts = [10**7] * 5000  # 5e10 examples
    order = Order(counts, seed=0, lanes=64)
    at = order.locate(np.array([0, 5 * 10**10 - 1, 10**15]))
    assert (at.index < 10**7).all()
    assert at.epoch.tolist() == [0, 0, 20_000]


@pytest.mark.parametrize(("counts", "most"), [([10, 5], 15), ([1], 1)])
def test_too_few_examples_for_the_lanes(counts: list[int], most: int) -> None:
    with pytest.raises(ConfigError, match=f"set data.lanes to at most {most}"):
        Order(counts, seed=0, lanes=64)
    Order(counts, seed=0, lanes=most)


def test_a_single_pass_has_every_example_once_and_ends() -> None:
    counts = [3, 0, 4]
    order = SinglePass(counts)
    batches = [ids(counts, order, order.batch(start, 5)).tolist() for start in (0, 5, 10)]
    assert [len(batch) for batch in batches] == [5, 2, 0]
    assert sorted(batches[0] + batches[1]) == list(range(7))
    assert batches[0] == sorted(batches[0])  # so that replicas share few shards
    assert SinglePass([0]).batch(0, 5).tolist() == []


def test_the_first_batches_of_a_single_pass_are_a_fair_sample() -> None:
    counts = [1000] * 50
    order = SinglePass(counts)
    shard = order.locate(
        np.concatenate([order.batch(start, 250) for start in range(0, 5000, 250)])
    ).shard
    found = np.bincount(
        shard, minlength=50
    )  # a tenth of each shard: mean 100, standard deviation 9.5
    assert 60 < found.min() <= found.max() < 140


@pytest.mark.parametrize("batch_size", [16, 48, 64, 256])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_working_set_is_what_a_replica_reads_from_at_a_time(
    batch_size: int, count: int
) -> None:
    order = Order([100] * 512, seed=0, lanes=64, window=2)
    window_steps = 2 * 100 * 64 // batch_size  # in which each lane goes through one window
    for index in {0, count - 1}:
        rows = [
            order.batch(step * batch_size, batch_size)[share(batch_size, index, count)]
            for step in range(window_steps)
        ]
        found = len(np.unique(order.locate(np.concatenate(rows)).shard))
        assert found <= order.working_set(batch_size, index, count) <= min(512, 2 * found)


@pytest.mark.parametrize(
    "counts",
    [[100] * 256, [1, 200] * 128, [1] * 200 + [500] * 56, [10, 300, 20, 70] * 64],
    ids=["equal", "alternating", "skewed", "mixed"],
)
def test_shards_of_any_sizes_are_opened_about_once_an_epoch(counts: list[int]) -> None:
    order = Order(counts, seed=0, lanes=16)
    most, opened, numbers = order.working_set(64, 0, 1), 0, np.arange(order.examples)
    held: OrderedDict[int, None] = OrderedDict()  # the least recently used first
    for batch in np.split(numbers, numbers[64::64]):
        for shard in np.unique(order.locate(batch).shard).tolist():
            opened += shard not in held
            held[shard] = None
            held.move_to_end(shard)
        while len(held) > most:
            held.popitem(last=False)
    assert 256 <= opened < 1.1 * 256


def test_the_working_set_covers_batches_that_begin_anywhere() -> None:
    """With batches of 48 and 64 lanes, a replica reads more lanes from some examples than others.

    It may continue from there after batches of another size.
    """
    order = Order([100] * 512, seed=0, lanes=64, window=2)
    window = 2 * 100 * 64 - 48  # examples in which each lane goes through one window
    found = [
        [order.batch(start, 48)[share(48, 1, 8)] for start in range(first, first + window, 48)]
        for first in (0, 8)
    ]
    shards = [len(np.unique(order.locate(np.concatenate(rows)).shard)) for rows in found]
    assert shards[0] < shards[1] <= order.working_set(48, 1, 8)


def test_the_working_set_of_few_shards_is_all_of_them() -> None:
    assert Order([100] * 5, seed=0, lanes=64).working_set(4096, 0, 1) == 5
    assert (
        Order([100] * 5000, seed=0, lanes=99_991).working_set(4096, 0, 1) == 5000
    )  # in bounded time and memory
