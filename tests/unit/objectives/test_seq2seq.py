"""Sequence to sequence: batches hold the given pairs, each for itself, in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing.policy import plan_shard
from samestep.errors import ConfigError
from samestep.examples import Examples
from tests.unit.objectives.texts import EOS, VOCABULARY, as_examples, only, pairs_of
from trainer.objectives.kinds.seq2seq import Config

Pair = tuple[list[int], list[int]]
LAYOUTS = ("encoder_decoder", "prefix_lm", "language_model")


def pack(config: Config, sequence_length: int, policy: str) -> tuple[Examples, list[Pair]]:
    """Pairs of random tokens as examples, and the pairs in their order there."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 15, (60, 2))
    line = random.integers(3, 1000, lengths.sum()).astype(np.int32)
    parts = np.concatenate(([0], np.cumsum(lengths)))
    total = lengths.sum(axis=1)
    shard = ShardIndex(parts[:-1:2], total, np.zeros((60, 2), dtype=np.uint32), parts[:-1])
    packed = plan_shard(shard, config.build(VOCABULARY).pack_spec(sequence_length), policy, key=1)
    first = shard.start[packed.document] + packed.begin
    texts = [line[at : at + n] for at, n in zip(first, packed.length, strict=True)]
    pairs = [
        ([*source.tolist(), EOS], [*target.tolist(), EOS])
        for source, target in zip(texts[::2], texts[1::2], strict=True)
    ]
    return as_examples(packed, np.concatenate(texts), True), pairs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["best_fit", "padded"])
def test_a_batch_holds_every_pair_apart_from_the_others(layout, policy):
    config = Config(target_length=32, layout=layout)
    examples, pairs = pack(config, 48, policy)
    objective = config.build(VOCABULARY)
    batch = objective.collate(examples, 48)
    assert batch["tokens"].shape[1] == 48
    assert batch["labels"].shape[1] == objective.predictions(48) == 32
    assert pairs_of(batch) == pairs
    assert objective.weights(batch) == {"lm": sum(len(target) for _, target in pairs)}


def test_a_row_does_not_depend_on_the_others():
    config = Config(target_length=32)
    examples, _ = pack(config, 48, "best_fit")
    objective = config.build(VOCABULARY)
    whole, some = objective.collate(examples, 48), objective.collate(only(examples, [4, 1]), 48)
    for name, array in some.items():
        assert np.array_equal(array, whole[name][[4, 1]]), name


def test_lengths_without_room_are_rejected():
    with pytest.raises(ConfigError, match=r"target_length is 1\. Use at least 2"):
        Config(target_length=1)
    with pytest.raises(ConfigError, match=r"sequence_length is 2\. Use at least 3"):
        Config(layout="prefix_lm").build(VOCABULARY).pack_spec(2)
