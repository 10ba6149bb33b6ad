"""Groups of examples of about the same length.

Little padding, and the same examples at any number of replicas.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.order.example_order import Location, Order, SinglePass
from data_pipeline.reading.length_groups import GROUPS, LengthGroups
from data_pipeline.sources.kinds import classification
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec, Parts, Vocabulary
from tests.unit.data_pipeline.loaders import global_batches, make_loader, valid_rows
from trainer.objectives.kinds import classification as objective

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
        Config(
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
