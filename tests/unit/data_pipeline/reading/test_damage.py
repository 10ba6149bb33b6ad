"""Whatever happens to the bytes of a shard, or is forged in it, none of that is fed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.format import writing
from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.writing import write_shard
from data_pipeline.order.example_order import Location
from data_pipeline.packing.policy import count_digest
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.counts import counts_name, write_counts
from data_pipeline.reading.dataset import CorruptShardError, Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import CorruptError, DataError
from samestep.examples import PackSpec, Policy, Sides
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


def forge(
    folder: Path,
    documents: Sequence[Sequence[int]],
    parts: Sequence[Sequence[int]] | None = None,
    fingerprint: str = "none",
    vocab_size: int = 100,
) -> Dataset:
    """A dataset whose manifest fits its shard, whatever is in it."""
    info = write_shard(
        folder / "train-000000.tar",
        [np.array(document, np.uint16) for document in documents],
        np.zeros((len(documents), 2), np.uint32),
        np.dtype(np.uint16),
        None if parts is None else [np.array(starts, np.int64) for starts in parts],
    )
    splits = {"train": (info,), "heldout": ()}
    settings = {} if parts is None else {"target_file": 0}
    numbers = (fingerprint, vocab_size, "uint16", {}, ("a",), len(documents), {})
    Manifest(FORMAT, *numbers, splits, settings).save(folder)
    return Dataset.open(folder)


def read(dataset: Dataset, spec: PackSpec, policy: Policy) -> None:
    zeros = np.zeros(1, np.int64)
    packed = PackedSplit(dataset, "train", spec, policy, 0)
    packed.read(Location(zeros, zeros, zeros), np.ones(1, np.float32))


def store_counts(dataset: Dataset, spec: PackSpec, policy: Policy, count: int) -> None:
    name = counts_name(dataset.manifest.digest, "train", count_digest(spec, policy))
    write_counts(dataset.path / name, [count])


PAIRS = PackSpec(16, 0, 0, sides=Sides((16, 16), ()), text_pairs=True)


@pytest.mark.parametrize("policy", ["padded", "best_fit"])
@pytest.mark.parametrize("parts", [[[0, 1], [0]], [[0], [0, 1, 2]], [[0], [0]]])
def test_forged_pairs_have_two_texts(tmp_path: Path, parts: list[list[int]], policy: Policy):
    dataset = forge(tmp_path, [[1, 2, 3], [4, 5, 6]], parts)
    with pytest.raises(CorruptError, match=r"000000\.tar .*a document is no pair of two texts"):
        read(dataset, PAIRS, policy)
    store_counts(dataset, PAIRS, policy, 1)
    with pytest.raises(CorruptShardError, match=r"000000\.tar .*no pair of two texts") as caught:
        read(dataset, PAIRS, policy)
    assert caught.value.shard == 0


def test_forged_counts_do_not_hide_a_pair_that_is_too_long(tmp_path: Path):
    dataset = forge(tmp_path, [range(40)], [[0, 20]])
    store_counts(dataset, PAIRS, "best_fit", 1)
    with pytest.raises(DataError, match="the target has 21 tokens"):
        read(dataset, PAIRS, "best_fit")


@pytest.mark.parametrize("place", [0, 5, 12])
def test_forged_tokens_are_in_the_vocabulary(tmp_path: Path, monkeypatch, place: int):
    monkeypatch.setattr(writing, "CHUNK_TOKENS", 5)
    tokens = np.full(13, 99)
    documents = np.split(tokens, [3, 4, 7, 7])
    read(forge(tmp_path, documents), PackSpec(16, 1, 1), "padded")
    tokens[place] = 100
    dataset = forge(tmp_path, documents)
    with pytest.raises(CorruptShardError, match="it has the token 100 of a vocabulary of 100"):
        read(dataset, PackSpec(16, 1, 1), "padded")


def test_a_forged_vocabulary_is_not_larger_than_the_tokenizer(tmp_path: Path):
    tokenizer = TokenizerConfig("", vocab_size=40).train(["some words", "and others"])
    tokenizer.save(tmp_path / "tokenizer")
    size = tokenizer.vocabulary.size
    assert forge(tmp_path, [[1]], None, tokenizer.fingerprint, size).tokenizer is not None
    dataset = forge(tmp_path, [[1]], None, tokenizer.fingerprint, size + 1)
    with pytest.raises(DataError, match=f"has {size} tokens, and the manifest says {size + 1}"):
        _ = dataset.tokenizer
