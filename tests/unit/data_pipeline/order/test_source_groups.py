"""`data.group_by_source`: each group of examples of a mixture is from one source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.order.mixture import MixedOrder, Schedule, SourceGroups
from data_pipeline.order.sources import PERIOD, Weights
from data_pipeline.reading.config import Config
from samestep.errors import ConfigError, DataError
from tests.unit.data_pipeline.loaders import Rows, assert_same, join, valid_rows
from tests.unit.data_pipeline.order.test_mixture import (
    MIX,
    SHARES,
    config,
    open_loader,
    orders,
    sources_of,
    take,
)

GROUP, BATCH = 15, 60


@pytest.fixture(scope="module")
def folders(write_dataset_to: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("groups")
    return {
        name: write_dataset_to(parent / name, shards=2 + number, documents=20 + 7 * number)
        for number, name in enumerate(MIX)
    }


def grouped(folders: dict[str, Path], **changes: Any) -> Config:
    return config(folders, changes.pop("mix", MIX), group_by_source=GROUP, **changes)


def assert_whole_groups(batches: list[Rows]) -> None:
    for rows in batches:
        group = rows["number"] // GROUP
        for each in group.unique():
            assert (group == each).sum() == GROUP
            assert len(rows["source"][group == each].unique()) == 1


@pytest.mark.parametrize("size", [1, 3, 8, 16, 30])
@pytest.mark.parametrize("lanes", [1, 8])
def test_groups_keep_the_shares_and_each_source_its_own_order(size: int, lanes: int) -> None:
    """Less than one group off at every prefix, over two changes of the shares, one in a group."""
    parts = [(0, SHARES[0]), (50 * size, SHARES[1]), (120 * size - size // 2, SHARES[2])]
    order = SourceGroups(Schedule.of(parts), orders(lanes), size)
    number = np.arange(400 * size)
    source, at = sources_of(order, number), order.locate(number)
    groups = source.reshape(-1, size)
    assert (groups == groups[:, :1]).all()
    ideal = np.zeros(3)
    for group in range(400):
        shares = SHARES[0] if group < 50 else SHARES[1] if group < 120 else SHARES[2]
        ideal += [shares.get(key, 0) / PERIOD for key in "abc"]
        taken = np.bincount(groups[: group + 1, 0], minlength=3)
        # Each change of the table adds at most one group.
        assert np.abs(taken - ideal).max() < 1 + (group >= 50) + (group >= 120)
    for each, (key, first) in enumerate(zip("abc", (0, 4, 6), strict=True)):
        rows = source == each
        alone = orders(lanes)[key].locate(np.arange(rows.sum()))
        assert at.epoch[rows].tolist() == alone.epoch.tolist()
        assert (at.shard[rows] - first).tolist() == alone.shard.tolist()
        assert at.index[rows].tolist() == alone.index.tolist()
    assert at.epoch[source == 0].max() > 0 or size < 3


def test_groups_of_one_lane_and_one_example_are_today_s_order() -> None:
    schedule, number = Schedule.of([(0, SHARES[0]), (700, SHARES[1])]), np.arange(3000)
    plain, single = MixedOrder(schedule, orders(1)), SourceGroups(schedule, orders(1), 1)
    for name in ("epoch", "shard", "index"):
        assert getattr(plain.locate(number), name).tolist() == (
            getattr(single.locate(number), name).tolist()
        )


def test_golden_values() -> None:
    """If this fails, the order of every grouped mixture changed; see `ORDER_VERSION`."""
    order = SourceGroups(Schedule.of([(0, SHARES[0]), (500, SHARES[1])]), orders(16), 20)
    at = order.locate([0, 19, 20, 40, 399, 499, 500, 519, 6000, 10**9])
    assert at.epoch.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 42, 7621761]
    assert at.shard.tolist() == [1, 0, 5, 0, 3, 5, 8, 8, 10, 8]
    assert at.index.tolist() == [11, 18, 5, 23, 89, 57, 13, 40, 15, 54]


@pytest.mark.parametrize("size", [8, 12, 16])
def test_a_replica_reads_only_shards_that_it_prepares(size: int) -> None:
    """Of its lanes where these divide a group, otherwise of all."""
    order = SourceGroups(Schedule.of([(0, SHARES[2])]), orders(8), size)
    for index, start in np.ndindex(2, 20):
        batch = order.batch(start * 48, 48)
        assert sorted(batch) == list(range(start * 48, start * 48 + 48))
        mine = batch[24 * index :][:24]
        ahead = set(order.shards_ahead(start * 48, 48, index, 2).tolist())
        assert set(order.locate(mine).shard.tolist()) <= ahead


def test_batches_are_whole_groups_through_resizes(folders: dict[str, Path]) -> None:
    """Over changes of the weights, threads and passes of all sources, and other batch sizes."""
    changes = (Weights(4, {"wiki": 1, "books": 1, "code": 8}),)
    settings = grouped(folders, weights=changes)
    expected, _ = take(settings, 24, size=BATCH)
    assert_whole_groups(expected)
    assert all(expected[-1]["epoch"][expected[-1]["source"] == 2] > 0)
    state, found = None, []
    for count in (3, 1, 5, 2):
        batches, state = take(replace(settings, threads=count % 3), 6, count, state, size=BATCH)
        found += batches
    assert_same(expected, found)
    assert state["mixture"][1][0] == 4 * BATCH
    # Batches of another size may follow, if they hold whole groups, too.
    _, state = take(grouped(folders), 3, size=BATCH)
    smaller, _ = take(grouped(folders), 4, state=state, size=GROUP)
    assert_whole_groups(smaller)
    assert by_number(smaller) == by_number(expected[3:4])


def by_number(batches: list[Rows]) -> list[tuple[int, int]]:
    rows = join(batches)
    return sorted(zip(rows["number"].tolist(), rows["digest"].tolist(), strict=True))


def test_a_state_in_a_group_goes_on_with_the_rest_of_it(folders: dict[str, Path]) -> None:
    """An audit chooses batches without regard to groups."""
    whole, state = take(grouped(folders), 4, size=BATCH)
    rest, _ = take(grouped(folders), 9, 2, {**state, "example": 37}, size=7)
    assert by_number(rest) == by_number(whole)[37:100]


def test_the_weights_may_change_where_a_run_goes_on(folders: dict[str, Path]) -> None:
    """Every source goes on where it was: a finished pass has each of its examples once."""
    stages = ({"wiki": 0.6, "books": 0.4}, MIX, {"books": 0.5, "code": 0.5})
    state, batches, names = None, [], []
    for count, mix in enumerate(stages, start=1):
        made, state = take(
            grouped(folders, mix=mix, on_change="accept"), 12, count, state, size=BATCH
        )
        assert_whole_groups(made)
        batches += made
        names += [[list(mix)[source] for source in rows["source"].tolist()] for rows in made]
    assert [first for first, _ in state["mixture"]] == [0, 12 * BATCH, 24 * BATCH]
    rows, of = join(batches), np.concatenate(names)
    for name, size in open_loader(grouped(folders), size=BATCH).sources:
        number, epoch, example = (
            rows[column].numpy()[of == name] for column in ("number", "epoch", "example")
        )
        last = epoch[np.argsort(number)][-8:].min()  # all lanes have come to this pass
        assert last >= 1 or name == "wiki"
        for each in range(last):
            assert sorted(example[epoch == each]) == list(range(size))
        assert len({*zip(epoch.tolist(), example.tolist(), strict=True)}) == len(example)
    with pytest.raises(DataError, match="the mixture changes from"):
        take(grouped(folders), 1, state=state, size=BATCH)


def test_one_dataset_can_become_a_mixture(folders: dict[str, Path]) -> None:
    """Groups change nothing of a single source, not even the order of rows."""
    plain = Config(path=str(folders["wiki"]), sequence_length=32, lanes=8, threads=0)
    alone = replace(plain, group_by_source=GROUP)
    before, state = take(alone, 4, size=BATCH)
    assert_same(before, take(plain, 4, size=BATCH)[0])
    after, _ = take(grouped(folders, on_change="accept"), 6, 2, state, size=BATCH)
    assert_whole_groups(after)
    rows = join([*before, *after])
    of = rows["source"] == 0
    fed = [*zip(rows["epoch"][of].tolist(), rows["example"][of].tolist(), strict=True)]
    assert len(set(fed)) == len(fed)
    with open_loader(grouped(folders), size=BATCH) as loader:  # weights of later steps only
        assert loader.state_dict()["group_by_source"] == GROUP


def test_whole_groups_can_be_excluded_and_parts_of_them_are_refused(
    folders: dict[str, Path],
) -> None:
    whole = dict(by_number(take(grouped(folders), 8, size=BATCH)[0]))
    excluded = ((45, 75), (150, 165))
    settings = grouped(folders, exclude=excluded)
    some, state = take(settings, 7, size=BATCH)
    assert_whole_groups(some)
    gone = {*range(45, 75), *range(150, 165)}
    assert by_number(some) == [(n, whole[n]) for n in range(7 * BATCH + 45) if n not in gone]
    with open_loader(settings, size=BATCH) as loader:  # as after a fault
        loader.load_state_dict(state)
        skipped = next(loader)
        loader.exclude(loader.consumed[0][0], loader.consumed[-1][1])
        assert {*loader.state_dict()["excluded"][-1]} == {7 * BATCH + 45, 8 * BATCH + 45}
        assert len(skipped) == len(next(loader))
    for part, fix in (((46, 75), "45, 75"), ((45, 70), "45, 75"), ((0, 1), "0, 15")):
        with pytest.raises(ConfigError, match=rf"exclude has \[{part[0]}.*groups.*as \[{fix}\]"):
            grouped(folders, exclude=(part,))


def test_groups_belong_to_the_order(folders: dict[str, Path]) -> None:
    _, state = take(grouped(folders), 1, size=BATCH)
    _, plain = take(config(folders, MIX), 1, size=BATCH)
    assert "group_by_source" not in plain  # states and ledgers stay as they were
    for settings, other in ((config(folders, MIX), state), (grouped(folders), plain)):
        with pytest.raises(DataError, match=r"group_by_source is .* set data.group_by_source"):
            take(settings, 1, state=other, size=BATCH)
    with pytest.raises(ConfigError, match=r"group_by_source is 0\. Use 1 or more"):
        config(folders, MIX, group_by_source=0)


def test_evaluation_has_no_groups(folders: dict[str, Path]) -> None:
    finite = {"split": "heldout", "finite": True, "size": 7}
    with (
        open_loader(grouped(folders), **finite) as found,
        open_loader(config(folders, MIX), **finite) as plain,
    ):
        assert_same(*([valid_rows(step) for step in each] for each in (found, plain)))


def test_readers_of_all_lanes_keep_their_shards_open(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 15 begin in any of 8 lanes; groups of 16 begin in the first."""
    asked: list[tuple[int, int, int]] = []
    working_set = MixedOrder.working_set

    def asking(order: MixedOrder, *reach: int) -> int:
        asked.append(reach)
        return working_set(order, *reach)

    monkeypatch.setattr(MixedOrder, "working_set", asking)
    open_loader(grouped(folders), 1, 2, size=60)
    open_loader(replace(grouped(folders), group_by_source=16), 1, 2, size=64)
    assert asked == [(60, 0, 1), (64, 1, 2)]
