"""Packing of pairs of texts: every pair is there once, whole, on both sides of one example; what cannot be is named."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline import text_pairs
from data_pipeline.policies import count_shard, packing_digest, plan_shard
from data_pipeline.shards import ShardIndex
from trainer.errors import DataError
from trainer.examples import PackSpec, Sides


def shard_of(lengths: np.ndarray) -> ShardIndex:
    """Pairs of texts of these lengths: int64 [D, 2]; pair i is of line i + 1."""
    lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
    total = lengths.sum(axis=1)
    start = np.cumsum(total) - total
    origin = np.stack((np.zeros(len(total)), np.arange(1, len(total) + 1)), axis=1).astype(np.uint32)
    return ShardIndex(start, total, origin, np.stack((start, start + lengths[:, 0]), axis=1).reshape(-1))


def sentences(pairs: int) -> np.ndarray:
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(3.2, 0.6, pairs), 1, 120)
    return np.stack((source, np.clip(source * random.lognormal(0, 0.25, pairs), 1, 110)), axis=1).astype(np.int64)


def spec_of(size: tuple[int, int], joined: bool = False, truncate: bool = False) -> PackSpec:
    return PackSpec(size[0], 0, 0, sides=Sides(size, (), joined), text_pairs=True, truncate=truncate)


@pytest.mark.parametrize("policy", ["best_fit", "padded"])
@pytest.mark.parametrize("joined", [False, True])
def test_every_pair_is_whole_in_one_example_and_nothing_overlaps(policy, joined):
    lengths = sentences(2000)
    spec = spec_of((256, 150), joined)
    packed = plan_shard(shard_of(lengths), spec, policy, key=3)
    assert packed.examples == count_shard(shard_of(lengths), spec, policy, 0, ["a"])
    source, target = (
        np.stack((packed.document, packed.begin, packed.length, packed.column), axis=1)
        .reshape(-1, 2, 4)
        .transpose(1, 0, 2)
    )
    assert np.array_equal(source[:, 0], target[:, 0])
    assert np.array_equal(np.sort(source[:, 0]), np.arange(2000))
    assert (source[:, 1] == 0).all()
    assert np.array_equal(target[:, 1], lengths[target[:, 0], 0])
    assert np.array_equal(np.stack((source[:, 2], target[:, 2]), axis=1), lengths[source[:, 0]])
    example = np.repeat(np.arange(packed.examples), np.diff(packed.example_start) // 2)
    cells = lengths[source[:, 0]] + 1
    if joined:
        cells[:, 0] += lengths[source[:, 0], 1]
    for side, (pieces, size) in enumerate(zip((source, target), spec.sides.size, strict=True)):
        ends = pieces[:, 3] + cells[:, side]
        same = example[1:] == example[:-1]
        assert (pieces[1:, 3][same] == ends[:-1][same]).all()
        assert (pieces[1:, 3][~same] == 0).all()
        assert ends.max() <= size
    if policy == "best_fit":
        assert packed.examples < 1.05 * (cells.sum(axis=0) / spec.sides.size).max()
    else:
        assert np.array_equal(source[:, 0], np.arange(2000))


def test_sources_that_are_too_long_lose_their_end():
    shard = shard_of([(3, 4), (40, 5)])
    for joined, kept in ((False, 9), (True, 4)):
        spec = spec_of((10, 6), joined, truncate=True)
        text_pairs.check(shard, spec, ["a"])
        packed = plan_shard(shard, spec, "padded")
        assert packed.length.tolist() == [3, 4, kept, 5]
        assert packed.begin.tolist() == [0, 3, 0, 40]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            spec_of((10, 7)),
            ["c.tsv:2: ", "source takes 41 cells, and data.sequence_length is 10", "too few for 1 of the 3"],
        ),
        (spec_of((10, 7)), ["raise it to at least 41, set objective.truncate_sources=true or remove"]),
        (
            spec_of((50, 6)),
            ["c.tsv:3: ", "target takes 7 cells, and objective.target_length is 6", "raise it to at least 7 or"],
        ),
        (spec_of((45, 7), joined=True), ["c.tsv:2: ", "pair takes 46 cells", "raise it to at least 46"]),
        (spec_of((6, 7), joined=True, truncate=True), ["c.tsv:2: ", "pair takes 7 cells", "raise it to at least 8 or"]),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(spec, words):
    with pytest.raises(DataError) as error:
        count_shard(shard_of([(3, 4), (40, 5), (2, 6)]), spec, "best_fit", 0, ["c.tsv"])
    assert all(word in str(error.value) for word in words), error.value


def test_the_digest_tells_apart_all_that_changes_examples():
    specs = [spec_of(size, joined, cut) for size in ((10, 6), (10, 7)) for joined in (0, 1) for cut in (0, 1)]
    specs.append(PackSpec(10, 0, 0))
    assert len({packing_digest(spec, policy) for spec in specs for policy in ("best_fit", "padded")}) == 18
