"""A mixture keeps its shares from example to example, goes through each source exactly once a pass,
and can go on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.format.manifest import Manifest
from data_pipeline.order.example_order import Order
from data_pipeline.order.mixture import MixedOrder, Schedule
from data_pipeline.order.sources import PERIOD, Source, Weights, round_weights
from data_pipeline.reading import concat_dataset as mixed
from data_pipeline.reading import loader as loader_module
from data_pipeline.reading import packed_split as dataset_module
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.config import Config
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.reading.packed_split import PackedSplit
from samestep.errors import ConfigError, DataError
from tests.unit.data_pipeline.loaders import (
    SPEC,
    Replica,
    Rows,
    assert_same,
    join,
    lay_out,
    valid_rows,
)

COUNTS = {"a": [100, 40, 7, 93], "b": [31, 60], "c": [5, 9, 80, 2, 44]}
SHARES = [
    {"a": 2458, "b": 1229, "c": 409},
    {"a": 100, "c": 3996},
    {"a": 1366, "b": 1365, "c": 1365},
]


def orders(lanes: int) -> dict[str, Order]:
    return {key: Order(counts, seed=3, lanes=lanes) for key, counts in COUNTS.items()}


def sources_of(order: MixedOrder, number: np.ndarray) -> np.ndarray:
    return np.searchsorted([4, 6], order.locate(number).shard, side="right")


@pytest.mark.parametrize("shares", [*SHARES, {"a": 1, "b": 4095}, {"a": PERIOD}])
@pytest.mark.parametrize("lanes", [1, 8])
def test_a_lane_keeps_its_shares_at_every_prefix(shares: dict[str, int], lanes: int) -> None:
    """Less than 1 example off from the start of the table, where lane 0 begins.

    Less than 2 from anywhere in it.
    """
    order = MixedOrder(Schedule.of([(0, shares)]), orders(lanes))
    turns = PERIOD + 100
    source = sources_of(order, np.arange(turns * lanes)).reshape(turns, lanes)
    for number, key in enumerate("abc"):
        ideal = np.arange(1, turns + 1) * shares.get(key, 0) / PERIOD
        off = np.abs(np.cumsum(source == number, axis=0) - ideal[:, None])
        assert off[:, 0].max() < 1
        assert off.max() < 2


@pytest.mark.parametrize("shares", SHARES)
def test_batches_keep_the_shares(shares: dict[str, int]) -> None:
    order = MixedOrder(Schedule.of([(0, shares)]), orders(64))
    source = sources_of(order, np.arange(256 * 200)).reshape(200, 256)
    for number, key in enumerate("abc"):
        assert np.abs((source == number).sum(axis=1) - 256 * shares.get(key, 0) / PERIOD).max() <= 8


@pytest.mark.parametrize("lanes", [1, 8, 13])
def test_every_pass_of_every_source_has_each_example_once(lanes: int) -> None:
    parts = [
        (0, SHARES[0]),
        (1001, SHARES[1]),
        (1500, SHARES[2]),
        (1501, SHARES[0]),
        (9999, SHARES[2]),
    ]
    order = MixedOrder(Schedule.of(parts), orders(lanes))
    number = np.arange(16_000)
    at, source = order.locate(number), sources_of(order, number)
    for each, (first, counts) in enumerate(zip((0, 4, 6), COUNTS.values(), strict=True)):
        rows = source == each
        example = (np.cumsum(counts) - counts)[at.shard[rows] - first] + at.index[rows]
        lane_epochs = [at.epoch[rows & (number % lanes == lane)] for lane in range(lanes)]
        assert all((np.diff(epochs) >= 0).all() and epochs[0] == 0 for epochs in lane_epochs)
        finished = min(int(epochs[-1]) for epochs in lane_epochs)
        assert finished >= 2
        for epoch in range(finished):
            assert sorted(example[at.epoch[rows] == epoch]) == list(range(sum(counts)))
        named = set(zip(at.epoch[rows].tolist(), example.tolist(), strict=True))
        assert len(named) == rows.sum()


def test_a_place_depends_on_nothing_that_comes_later_or_has_no_share() -> None:
    number = np.arange(5000)
    at = MixedOrder(Schedule.of([(0, SHARES[0]), (4000, SHARES[1])]), orders(8)).locate(number)
    same = MixedOrder(
        Schedule.of([(0, {**SHARES[0], "z": 0}), (300, SHARES[0])]), orders(8)
    ).locate(number[:4000])
    for name in ("epoch", "shard", "index"):
        assert getattr(at, name)[:4000].tolist() == getattr(same, name).tolist()
    alone = MixedOrder(Schedule.of([(0, {"b": PERIOD})]), {"b": orders(8)["b"]})
    assert alone.locate(number).index.tolist() == orders(8)["b"].locate(number).index.tolist()


def test_golden_values() -> None:
    """If this fails, the order of every mixture changed.

    Raise ORDER_VERSION, so that checkpoints are not continued.
    """
    order = MixedOrder(Schedule.of([(0, SHARES[0]), (500, SHARES[1])]), orders(16))
    at = order.locate([0, 1, 2, 17, 100, 499, 500, 501, 6000, 10**9])
    assert at.epoch.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 37, 6774899]
    assert at.shard.tolist() == [1, 5, 5, 9, 5, 10, 10, 10, 6, 10]
    assert at.index.tolist() == [11, 8, 14, 0, 24, 19, 26, 34, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_any_shares_are_spread_within_one_example(seed: int) -> None:
    draw = np.random.default_rng(seed)
    weights = draw.dirichlet(np.full(draw.integers(2, 9), 0.5)) + 1e-3
    shares = round_weights({f"{i}": float(weight) for i, weight in enumerate(weights)})
    assert sum(shares.values()) == PERIOD
    counts = {key: Order([10], seed=0, lanes=1) for key in shares}
    shard = MixedOrder(Schedule.of([(0, shares)]), counts).locate(np.arange(PERIOD)).shard
    for number, share in enumerate(shares.values()):
        taken = np.cumsum(shard == number)
        assert np.abs(taken - np.arange(1, PERIOD + 1) * share / PERIOD).max() < 1
        assert taken[-1] == share


@pytest.fixture(scope="module")
def folders(write_dataset_to: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three datasets without a token in common."""
    parent, made = tmp_path_factory.mktemp("mixture"), {}
    for number, name in enumerate(("wiki", "books", "code")):
        made[name] = write_dataset_to(
            parent / name, shards=2 + number, documents=20 + 7 * number, heldout=number
        )
    return made


def config(folders: dict[str, Path], mix: dict[str, float], **changes: Any) -> Config:
    sources = tuple(Source(str(folders[name]), weight) for name, weight in mix.items())
    return Config(
        sources=sources, sequence_length=32, lanes=8, threads=changes.pop("threads", 0), **changes
    )


def open_loader(
    settings: Config, index: int = 0, count: int = 1, size: int = 62, **changes: Any
) -> StreamingLoader:
    layout = BatchLayout(size, 16, Replica(index, count))
    order = SplitOrder(seed=7, **changes)
    return StreamingLoader(
        settings.open(), settings, order, layout, pack_spec=SPEC, collate=lay_out
    )


MIX = {"wiki": 0.5, "books": 0.3, "code": 0.2}


def take(
    settings: Config, steps: int, count: int = 1, state: Any = None, **changes: Any
) -> tuple[list[Rows], Any]:
    """The global batches of some steps, and the state after them."""
    replicas = []
    for index in range(count):
        with open_loader(settings, index, count, **changes) as loader:
            if state:
                loader.load_state_dict(state)
            replicas.append([valid_rows(next(loader)) for _ in range(steps)])
            after = loader.state_dict()
    return [join(parts) for parts in zip(*replicas, strict=True)], after


def test_batches_are_the_same_through_resizes(folders: dict[str, Path]) -> None:
    changes = (
        Weights(4, {"wiki": 0.1, "books": 0.1, "code": 0.8}),
        Weights(9, {"wiki": 1, "books": 0, "code": 1}),
    )
    settings = config(folders, MIX, weights=changes)
    expected, _ = take(settings, 15)
    state, found = None, []
    for count in (3, 1, 5, 2, 4):
        batches, state = take(replace(settings, threads=count % 3), 3, count, state)
        found += batches
    assert_same(expected, found)
    assert state["mixture"][1][0] == 4 * 62
    assert not any((rows["source"] == 1).any() for rows in expected[9:])
    for rows in expected[:4]:
        assert (
            np.abs(np.bincount(rows["source"], minlength=3) - 62 * np.array([0.5, 0.3, 0.2])).max()
            < 6
        )


def test_every_row_is_of_the_source_that_it_names(folders: dict[str, Path]) -> None:
    """A mixture's examples are those that its sources give by themselves.

    A digest says of which one.
    """
    single: dict[tuple[int, int, int], list[int]] = {}
    for source, name in enumerate(MIX):
        with open_loader(
            replace(config(folders, {name: 1}), sources=(), path=str(folders[name]))
        ) as loader:
            assert loader.sources == ((str(folders[name]), loader.examples),)
            for rows in (valid_rows(next(loader)) for _ in range(8)):
                for row in range(62):
                    key = (source, int(rows["epoch"][row]), int(rows["example"][row]))
                    single[key] = [rows["digest"][row].item(), *rows["tokens"][row].tolist()]
    batches, _ = take(config(folders, MIX), 12)
    rows = join(batches)
    for row in range(len(rows["digest"])):
        key = (int(rows["source"][row]), int(rows["epoch"][row]), int(rows["example"][row]))
        assert [rows["digest"][row].item(), *rows["tokens"][row].tolist()] == single[key]
    assert len(rows["digest"].unique()) == len(rows["digest"])


def test_weights_of_steps_to_come_may_change_freely(folders: dict[str, Path]) -> None:
    settings = config(folders, MIX)
    late = replace(settings, weights=(Weights(5, {"wiki": 0, "books": 0, "code": 1}),))
    _, state = take(settings, 3)
    assert_same(take(late, 6)[0][3:], take(late, 3, state=state)[0])
    assert_same(
        take(late, 7)[0][5:], take(late, 2, state=take(settings, 5)[1])[0]
    )  # the change begins right there


def test_another_mixture_is_refused_unless_accepted(folders: dict[str, Path]) -> None:
    two = {"wiki": 0.6, "books": 0.4}
    _, state = take(config(folders, two), 3)
    for changed, said in (
        (config(folders, MIX), "wiki 0.6.*wiki 0.5"),
        (config(folders, {"wiki": 0.5, "books": 0.5}), "changes from .* to .*books 0.5"),
        (config(folders, {"wiki": 1, "code": 1}), "a dataset of digest [0-9a-f]{12}"),
        (Config(path=str(folders["wiki"]), sequence_length=32, lanes=8), "wiki 1"),
    ):
        with pytest.raises(
            DataError, match=rf"(?s){said}.*set data.on_change=accept .* from example 186"
        ):
            take(changed, 1, state=state)


def test_an_accepted_change_is_recorded_and_every_source_goes_on_where_it_was(
    folders: dict[str, Path],
) -> None:
    """Two sources, then three, then without the first one.

    No example of a finished pass is lost or repeated.
    """
    stages = (
        {"wiki": 0.6, "books": 0.4},
        MIX,
        {"books": 0.5, "code": 0.5},
        {"code": 0.2, "wiki": 0.4, "books": 0.4},
    )
    state, batches, names = None, [], []
    for count, weights in enumerate(stages, start=1):
        made, state = take(config(folders, weights, on_change="accept"), 7, count, state)
        batches += made
        names += [[list(weights)[source] for source in rows["source"].tolist()] for rows in made]
    assert [first for first, _ in state["mixture"]] == [0, 7 * 62, 14 * 62, 21 * 62]
    again, _ = take(
        config(folders, stages[-1]), 2, 3, state
    )  # what was accepted need not be accepted again
    more, _ = take(config(folders, stages[-1], on_change="accept"), 2, state=state)
    assert_same(again, more)
    rows, of = join(batches), np.concatenate(names)
    for name, size in open_loader(config(folders, MIX)).sources:
        lane, epoch, example = (
            rows[column].numpy()[of == name] for column in ("number", "epoch", "example")
        )
        finished = min(epoch[lane % 8 == each].max() for each in range(8))
        assert finished >= 1
        for number in range(finished):
            assert sorted(example[epoch == number]) == list(range(size))
        assert len({*zip(epoch.tolist(), example.tolist(), strict=True)}) == len(example)


def test_a_past_can_be_made_again_as_it_was_recorded(folders: dict[str, Path]) -> None:
    first, state = take(config(folders, {"wiki": 0.6, "books": 0.4}), 3)
    second, state = take(config(folders, MIX, on_change="accept"), 3, state=state)
    with open_loader(config(folders, {"wiki": 0, "books": 0, "code": 1})) as loader:
        loader.load_state_dict({**state, "example": 62}, as_recorded=True)
        assert_same([*first[1:], *second], [valid_rows(next(loader)) for _ in range(5)])
    with open_loader(config(folders, {"code": 1})) as loader:
        loader.load_state_dict({**state, "example": 62}, as_recorded=True)
        with pytest.raises(
            DataError, match=r"no longer in data.sources.*; add it again, with weight 0"
        ):
            next(loader)


def test_one_dataset_can_become_a_mixture(folders: dict[str, Path]) -> None:
    path = Config(path=str(folders["wiki"]), sequence_length=32, lanes=8, threads=0)
    before, state = take(path, 4)
    same, _ = take(config(folders, {"wiki": 1}), 4)
    assert_same(before, same)
    after, _ = take(config(folders, MIX, on_change="accept"), 9, state=state)
    fed = [
        (epoch, example)
        for rows in (*before, *after)
        for source, epoch, example in zip(
            *(rows[name].tolist() for name in ("source", "epoch", "example")), strict=True
        )
        if source == 0
    ]
    assert len(set(fed)) == len(fed)


def test_a_state_from_before_there_were_mixtures_is_continued(folders: dict[str, Path]) -> None:
    path = Config(path=str(folders["wiki"]), sequence_length=32, lanes=8, threads=0)
    whole, _ = take(path, 5)
    _, state = take(path, 3)
    del state["mixture"], state["excluded"]
    digest = Manifest.load(folders["wiki"]).digest
    assert_same(whole[3:], take(path, 2, state={**state, "manifest": digest})[0])
    with pytest.raises(DataError, match="a dataset of digest another"):
        take(path, 1, state={**state, "manifest": "another"})


def test_excluded_examples_do_not_shift_the_mixture(folders: dict[str, Path]) -> None:
    settings = config(folders, MIX)
    whole = join(take(settings, 10)[0])
    some = join(take(replace(settings, exclude=((62, 124), (300, 310))), 8)[0])
    digest = dict(zip(whole["number"].tolist(), whole["digest"].tolist(), strict=True))
    assert [digest[number] for number in some["number"].tolist()] == some["digest"].tolist()
    assert not set(some["number"].tolist()) & {*range(62, 124), *range(300, 310)}


@pytest.mark.parametrize("taken", range(8))
def test_weights_change_at_their_step_whatever_is_excluded(
    folders: dict[str, Path], taken: int
) -> None:
    """Excluded from the start, on the way, or before the run goes on from there: all the same."""
    settings = config(folders, MIX, weights=(Weights(5, {"wiki": 0, "books": 0, "code": 1}),))
    excluded = ((62, 70), (300, 310))
    with open_loader(replace(settings, exclude=excluded, threads=2)) as loader:
        before = [valid_rows(next(loader)) for _ in range(taken)]
        next(loader)
        skipped = tuple((first, end) for first, end in loader.consumed)
        loader.exclude(skipped[0][0], skipped[-1][1])
        state = loader.state_dict()
        after = [valid_rows(next(loader)) for _ in range(10 - taken)]
    for step, rows in enumerate([*before, *after], start=1):
        assert (step > 5) == bool((rows["source"] == 2).all())
    assert_same(after, take(replace(settings, exclude=excluded), 10 - taken, state=state)[0])
    always = replace(settings, exclude=(*excluded, *skipped))
    assert_same([*before, *after], take(always, 10)[0])


def test_every_source_keeps_the_shards_open_that_it_reads_from(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 2, 3 and 4, and 9 may be open.

    With equal parts of those, some would be opened again and again.
    """
    opened, pack = [], PackedSplit._pack
    monkeypatch.setattr(
        PackedSplit, "_pack", lambda split, number: opened.append(number) or pack(split, number)
    )
    for module in (dataset_module, loader_module, mixed):
        monkeypatch.setattr(module, "max_open_shards", lambda: 9)
    take(config(folders, MIX), 12)
    assert len(opened) == 9


def test_evaluation_is_one_pass_over_the_heldout_documents_of_all_sources(
    folders: dict[str, Path],
) -> None:
    with open_loader(config(folders, MIX), split="heldout", finite=True) as loader:
        rows = join([valid_rows(step) for step in loader])
        assert [name for name, _ in loader.sources] == ["books", "code"]  # the first has none
        for source, (_, examples) in enumerate(loader.sources):
            assert sorted(rows["example"][rows["source"] == source].tolist()) == list(
                range(examples)
            )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": -1.0, "b": 2.0}, "weights must not be negative"),
        ({"a": 0.0}, "nor all 0"),
        ({"a": float("nan"), "b": 1.0}, "weights must not be negative"),
        ({"a": 1e-9, "b": 1.0}, "weight of a is below 1/4096"),
    ],
)
def test_impossible_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(sources=tuple(Source(name, weight) for name, weight in weights.items()))


def test_impossible_mixtures_are_refused(folders: dict[str, Path], write_dataset: Any) -> None:
    two = (Source("x/a"), Source("y/b"))
    for settings, message in (
        ({}, "Set either path to a dataset"),
        ({"path": "x", "sources": two}, "Set either path"),
        ({"sources": (Source("x/a"), Source("y/a"))}, "same name in a, a"),
        (
            {"sources": two, "weights": (Weights(3, {"a": 1}),)},
            "of step 3 name a; name all sources: a, b",
        ),
        ({"sources": two, "weights": (Weights(0, {"a": 1, "b": 1}),)}, "step 0 must be at least 1"),
        ({"path": "x", "weights": (Weights(3, {"a": 1}),)}, "data.path is one dataset"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(**settings)
    with pytest.raises(ConfigError, match="lists the same dataset twice"):
        Config(
            sources=(Source(str(folders["wiki"])), Source(str(folders["wiki"]), name="again"))
        ).open()
    other = write_dataset("other", shards=2)
    manifest = Manifest.load(other)
    replace(manifest, tokenizer_fingerprint="another").save(other)
    with pytest.raises(DataError, match=r"wiki and .*other were built with different tokenizers"):
        Config(sources=(Source(str(folders["wiki"])), Source(str(other)))).open()
    with pytest.raises(ConfigError, match=r"wiki: data.lanes is 999"):
        open_loader(replace(config(folders, MIX), lanes=999))
