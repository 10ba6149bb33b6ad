"""Whatever happens to the bytes of a shard, none of them is fed."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.dataset import Dataset
from tests.damage import damaged
from tests.unit.data_pipeline.conftest import WriteDataset
from tests.unit.data_pipeline.loaders import (
    Rows,
    assert_same,
    global_batches,
    make_loader,
    valid_rows,
)
from tests.web import WebServer
from trainer.errors import DataError


@pytest.mark.parametrize("rounds", [20, pytest.param(250, marks=pytest.mark.chaos)])
def test_damage_to_a_local_shard_is_noticed_before_it_is_fed(
    write_dataset: WriteDataset, rounds: int
) -> None:
    """The batches before it are right.

    And whether examples were counted before the damage or after, nothing is fed.
    """
    folder = write_dataset(shards=3, documents=12, heldout=1)
    settings = {"lanes": 2, "window": 1, "global_batch_size": 6}
    steps = 8  # more than an epoch
    sound = global_batches(folder, steps, **settings)
    chance = random.Random(0)
    for number in range(rounds):
        if number % 2:
            shutil.rmtree(folder / ".cache")
        fed: list[Rows] = []
        with damaged(sorted(folder.glob("train-*.tar")), chance) as damage:
            with pytest.raises(DataError, match="train-"):
                feed(folder, steps, fed, **settings)
            assert len(fed) < steps, damage
        assert_same(fed, sound[: len(fed)])
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        assert_same(global_batches(folder, 1, **settings), sound[:1])


def feed(folder: Path, steps: int, fed: list[Rows], **settings: int) -> None:
    with make_loader(folder, **settings) as loader:
        for _ in range(steps):
            fed.append(valid_rows(next(loader)))


def test_a_shard_that_the_cache_s_disk_has_damaged_is_fetched_again(
    write_dataset: WriteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_dataset(shards=1)
    (folder / "tokenizer").mkdir()
    with closing(WebServer(folder)) as web:
        cache = ShardCache(tmp_path / "cache" / "shards", 10**9)
        cache.prepare()
        shard = Dataset.open(folder).manifest.splits["train"][0]
        address = (f"{web.url}/{shard.name}", shard.sha256, shard.bytes)
        cache.open(*address).close()
        (kept,) = cache.folder.glob("*.tar")
        for round in range(5):
            before = web.contents.total()
            with damaged([kept], random.Random(round)), cache.open(*address) as file:
                assert file.read() == (folder / shard.name).read_bytes()
            assert web.contents.total() > before
            assert "was damaged on this disk; downloading it again" in caplog.text
