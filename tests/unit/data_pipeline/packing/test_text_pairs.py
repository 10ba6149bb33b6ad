"""Packing of pairs of texts: every pair is there once, whole, on both sides of one example.

What cannot be is named.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing.policy import count_shard, packing_digest, plan_shard
from samestep.errors import DataError
from samestep.examples import PackSpec, Sides


def shard_of(lengths: np.ndarray) -> ShardIndex:
    """Pairs of texts of these lengths: int64 [D, 2]; pair i is of line i + 1."""
    lengths = np.asarray(lengths, dtype=np.int64).reshape(-1, 2)
    total = lengths.sum(axis=1)
    start = np.cumsum(total) - total
    origin = np.stack((np.zeros(len(total)), np.arange(1, len(total) + 1)), axis=1).astype(
        np.uint32
    )
    return ShardIndex(
        start, total, origin, np.stack((start, start + lengths[:, 0]), axis=1).reshape(-1)
    )


def sentences(pairs: int) -> np.ndarray:
    random = np.random.default_rng(0)
    source = np.clip(random.lognormal(3.2, 0.6, pairs), 1, 120)
    return np.stack(
        (source, np.clip(source * random.lognormal(0, 0.25, pairs), 1, 110)), axis=1
    ).astype(np.int64)


def spec_of(
    size: tuple[int, int], joined: bool = False, sources: bool = False, targets: bool = False
) -> PackSpec:
    cut = {"truncate_sources": sources, "truncate_targets": targets}
    return PackSpec(size[0], 0, 0, sides=Sides(size, (), joined), text_pairs=True, **cut)


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
    needed = lengths[source[:, 0]] + 1
    if joined:
        needed[:, 0] += lengths[source[:, 0], 1]
    for side, (pieces, size) in enumerate(zip((source, target), spec.sides.size, strict=True)):
        ends = pieces[:, 3] + needed[:, side]
        same = example[1:] == example[:-1]
        assert (pieces[1:, 3][same] == ends[:-1][same]).all()
        assert (pieces[1:, 3][~same] == 0).all()
        assert ends.max() <= size
    if policy == "best_fit":
        assert packed.examples < 1.05 * (needed.sum(axis=0) / spec.sides.size).max()
    else:
        assert np.array_equal(source[:, 0], np.arange(2000))


@pytest.mark.parametrize("policy", ["best_fit", "padded"])
@pytest.mark.parametrize(
    ("joined", "targets", "kept"),
    [(False, False, (9, 5)), (True, False, (4, 5)), (False, True, (9, 2)), (True, True, (7, 2))],
)
def test_texts_that_are_too_long_lose_their_end(policy, joined, targets, kept):
    shard = shard_of([(3, 2), (40, 5)])
    spec = spec_of((10, 3 if targets else 6), joined, sources=True, targets=targets)
    assert count_shard(shard, spec, policy, 0, ["a"]) == 2
    packed = plan_shard(shard, spec, policy)
    pieces = zip(
        packed.document.tolist(), packed.begin.tolist(), packed.length.tolist(), strict=True
    )
    assert sorted(pieces) == [(0, 0, 3), (0, 3, 2), (1, 0, kept[0]), (1, 40, kept[1])]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            spec_of((10, 7)),
            [
                "c.tsv:2: ",
                "source has 41 tokens, end tokens included, and data.sequence_length is 10",
                "too few for 1 of the 3",
            ],
        ),
        (
            spec_of((10, 7)),
            ["raise it to at least 41, set objective.truncate_sources=true or remove"],
        ),
        (
            spec_of((50, 6)),
            [
                "c.tsv:3: ",
                "target has 7 tokens, end tokens included, and objective.target_length is 6",
                "raise it to at least 7, set objective.truncate_targets=true or",
            ],
        ),
        (
            spec_of((45, 7), joined=True),
            ["c.tsv:2: ", "pair has 46 tokens", "raise it to at least 46"],
        ),
        (
            spec_of((6, 7), joined=True, sources=True),
            ["c.tsv:2: ", "pair has 7 tokens", "raise it to at least 8 or"],
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(spec, words):
    with pytest.raises(DataError) as error:
        count_shard(shard_of([(3, 4), (40, 5), (2, 6)]), spec, "best_fit", 0, ["c.tsv"])
    assert all(word in str(error.value) for word in words), error.value


def test_the_digest_tells_apart_all_that_changes_examples():
    flags = itertools.product((False, True), repeat=3)
    specs = [spec_of(size, *flag) for flag in flags for size in ((10, 6), (10, 7))]
    specs.append(PackSpec(10, 0, 0))
    assert (
        len({packing_digest(spec, policy) for spec in specs for policy in ("best_fit", "padded")})
        == 34
    )
