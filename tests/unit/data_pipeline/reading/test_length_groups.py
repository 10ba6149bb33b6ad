"""Groups of examples of about the same length.

Little padding, and the same examples at any number of replicas.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as DatasetConfig
from data_pipeline.order.example_order import Location, Order, SinglePass
from data_pipeline.order.mixture import Schedule, SourceGroups
from data_pipeline.order.sources import PERIOD, Source
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.config import Config
from data_pipeline.reading.length_groups import GROUPS, LengthGroups
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.sources.kinds import classification
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec, Parts, Vocabulary
from tests.unit.data_pipeline.loaders import global_batches, join, make_loader, valid_rows
from trainer.objectives.kinds import classification as objective
from trainer.strategies import Replica

ROWS, LENGTH, BATCH = 500, 64, 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths."""
    folder = tmp_path_factory.mktemp("rows")
    draw = np.random.default_rng(0)
    texts = [
        " ".join(draw.choice(["red", "green", "blue"], min(60, int(draw.lognormal(2, 0.8)) + 1)))
        for _ in range(ROWS)
    ]
    lines = [
        json.dumps({"text": text, "label": number % 2}) + "\n" for number, text in enumerate(texts)
    ]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "dev.jsonl").write_text("".join(lines[:130]))
    TokenizerConfig("", "wordpiece", 40).train(texts).save(folder / "tokenizer")
    source = classification.Config(
        (f"{folder}/train.jsonl",), (f"{folder}/dev.jsonl",), labels=("a", "b")
    )
    build(
        DatasetConfig(
            source,
            TokenizerConfig(f"{folder}/tokenizer"),
            f"{folder}/built",
            shard_bytes=8000,
            workers=1,
        )
    )
    return folder / "built"


def settings(**changes: Any) -> dict[str, Any]:
    made = objective.Config().build(Vocabulary(40, 0, 2, 3, 4, (0, 1, 2, 3, 4)))
    found = {
        "pack_spec": made.pack_spec(LENGTH),
        "collate": made.collate,
        "packing": "padded",
        "group_by_length": BATCH,
    }
    return {**found, "global_batch_size": BATCH, **changes}


def names(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    columns = (
        batch[name].tolist() for name in ("number", "epoch", "example", "digest", "dropout_key")
    )
    return sorted(zip(*columns, strict=True))


def test_replicas_share_the_same_batches_which_are_as_wide_as_they_must_be(dataset: Path) -> None:
    alone = global_batches(dataset, 45, **settings())
    for count in (2, 3):
        together = global_batches(dataset, 45, count, **settings())
        assert [names(batch) for batch in together] == [names(batch) for batch in alone]
        assert [batch["tokens"].shape[1] for batch in together] == [
            batch["tokens"].shape[1] for batch in alone
        ]
    widths = [batch["tokens"].shape[1] for batch in alone]
    assert all(
        width % 8 == 0 and int(batch["filled"].max()) > width - 8
        for width, batch in zip(widths, alone, strict=True)
    )
    positions = sum(batch["tokens"].numel() for batch in alone)
    assert (
        sum(int(batch["filled"].sum()) for batch in alone) > 0.75 * positions
    )  # ungrouped, a quarter is text
    assert widths != sorted(widths)


def test_the_examples_and_their_digests_are_those_without_groups(dataset: Path) -> None:
    """Of one pass over the held-out rows; of training, each pass has every example once."""
    grouped, plain = (
        [
            row
            for step in make_loader(dataset, split="heldout", finite=True, **each)
            for row in names(valid_rows(step))
        ]
        for each in (settings(), settings(group_by_length=None))
    )
    assert sorted(row[2:4] for row in grouped) == sorted(row[2:4] for row in plain)
    assert len(grouped) == 130
    with make_loader(dataset, **settings(lanes=1)) as loader:
        rows = [
            row for step in islice(loader, -(-2 * ROWS // BATCH)) for row in names(valid_rows(step))
        ]
    for epoch in (0, 1):
        found = [example for _, at, example, *_ in rows if at == epoch]
        assert len(found) == len(set(found))
    assert len({example for _, at, example, *_ in rows if at == 0}) == ROWS


def test_a_loader_goes_on_where_another_was(dataset: Path) -> None:
    with make_loader(dataset, **settings()) as loader:
        steps = [names(valid_rows(step)) for step in islice(loader, 30)]
    with make_loader(dataset, **settings()) as loader:
        list(islice(loader, 11))
        state = loader.state_dict()
    resumed = global_batches(dataset, 19, 2, state, **settings())
    assert [names(batch) for batch in resumed] == steps[11:]
    with (
        make_loader(dataset, **settings(group_by_length=24)) as loader,
        pytest.raises(DataError, match="group_by_length"),
    ):
        loader.load_state_dict(state)


def test_what_cannot_be_grouped_is_refused(dataset: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.group_by_length needs rows of a task with one sequence each"
    ):
        make_loader(dataset, **settings(pack_spec=PackSpec(LENGTH, 1, 1)))
    choices = PackSpec(LENGTH, 1, 1, parts=Parts("multiple_choice", choices=2))
    with pytest.raises((ConfigError, DataError)):
        make_loader(dataset, **settings(pack_spec=choices))


@pytest.mark.parametrize("examples", [1, 7, GROUPS * 3, GROUPS * 3 + 5, GROUPS * 7 + 1])
def test_groups_permute_pools(examples: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 99, examples)

    def positions(at: Location) -> np.ndarray:
        return lengths[at.index]

    finite = LengthGroups(SinglePass([examples]), positions, 3, seed=0, finite=True)
    assert sorted(finite.locate(np.arange(examples)).index.tolist()) == list(range(examples))
    assert finite.batch(examples - 1, 4).tolist() == [examples - 1]
    endless = LengthGroups(Order([examples], seed=0, lanes=1), positions, 3, seed=0, finite=False)
    number = np.arange(2 * GROUPS * 3)
    at = endless.locate(number)
    plain = Order([examples], seed=0, lanes=1).locate(number)
    assert sorted(zip(at.epoch, at.index, strict=True)) == sorted(
        zip(plain.epoch, plain.index, strict=True)
    )
    spread = np.ptp(positions(at).reshape(-1, 3), axis=1).mean()
    assert examples < 100 or spread < 5


@pytest.mark.parametrize("size", [3, 8])
def test_groups_from_one_source_stay_from_one(size: int) -> None:
    """Pools do not end where the passes of sources do, and each group is sorted by length."""
    lengths = np.random.default_rng(1).integers(1, 99, (6, 1000))

    def positions(at: Location) -> np.ndarray:
        return lengths[at.shard, at.index]

    counts = {"a": [90, 60], "b": [70], "c": [200, 31, 7]}
    orders = {key: Order(each, seed=3, lanes=4) for key, each in counts.items()}
    shares = {"a": PERIOD // 2, "b": PERIOD // 4, "c": PERIOD // 4}
    order = SourceGroups(Schedule.of([(0, shares)]), orders, size)
    grouped = LengthGroups(order, positions, size, seed=0, finite=False)
    pool = GROUPS * size
    number = np.arange(4 * pool)
    source = np.searchsorted([2, 3], grouped.locate(number).shard, side="right")
    assert (source.reshape(-1, size) == source.reshape(-1, size)[:, :1]).all()
    assert (source != order.source_of(number)).any(), "groups change places"

    def rows(of: Any, first: int) -> list[tuple[int, ...]]:
        at = of.locate(number[first : first + pool])
        return sorted(zip(*(each.tolist() for each in (at.epoch, at.shard, at.index)), strict=True))

    for first in range(0, 4 * pool, pool):
        assert rows(grouped, first) == rows(order, first)
    spread, plain = (
        np.ptp(positions(of.locate(number)).reshape(-1, size), axis=1).mean()
        for of in (grouped, order)
    )
    assert spread < plain / 4


def test_batches_of_groups_from_one_source(dataset: Path, tmp_path: Path) -> None:
    """The same at any number of replicas, narrow, and as groups only where both sizes are equal."""
    source = classification.Config((f"{dataset.parent}/dev.jsonl",), labels=("a", "b"))
    tokenizer = TokenizerConfig(f"{dataset.parent}/tokenizer")
    build(DatasetConfig(source, tokenizer, f"{tmp_path}/other", workers=1, heldout_fraction=0.0))
    sources = (Source(str(dataset), 2.0), Source(f"{tmp_path}/other", 1.0))
    given = settings()
    config = Config(
        sources=sources,
        sequence_length=LENGTH,
        lanes=4,
        packing="padded",
        threads=0,
        group_by_length=BATCH,
        group_by_source=BATCH,
    )

    def batches(count: int, config: Config = config) -> list[dict[str, torch.Tensor]]:
        parts = []
        for index in range(count):
            layout = BatchLayout(2 * BATCH, 4, Replica(index, count))
            spec, collate = given["pack_spec"], given["collate"]
            with StreamingLoader(
                config.open(), config, SplitOrder(seed=7), layout, pack_spec=spec, collate=collate
            ) as loader:
                parts.append([valid_rows(next(loader)) for _ in range(40)])
        return [join(each) for each in zip(*parts, strict=True)]

    alone = batches(1)
    assert [names(each) for each in batches(3)] == [names(each) for each in alone]
    for rows in alone:
        group = rows["number"] // BATCH
        for each in group.unique():
            assert len(rows["source"][group == each].unique()) == 1
    assert {int(each) for rows in alone for each in rows["source"]} == {0, 1}
    plain = batches(1, replace(config, group_by_length=None))
    widths = [sum(each["tokens"].numel() for each in of) for of in (alone, plain)]
    assert widths[0] < 0.8 * widths[1]
    with pytest.raises(ConfigError, match=r"group_by_length is 12, and data.group_by_source is"):
        batches(1, replace(config, group_by_source=24))
