"""Multi-task pre-training: each row is what its own objective makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.examples import Examples
from samestep.hashing import mix
from tests.unit.objectives.test_seq2seq import pack as pack_pairs
from tests.unit.objectives.texts import VOCABULARY, only, pack
from trainer.objectives.kinds import (
    causal_lm,
    denoising,
    multi_task,
    prefix_lm,
    seq2seq,
    span_corruption,
)

LENGTH = 48
OF = {
    "span_corruption": span_corruption.Config(target_length=40),
    "prefix_lm": prefix_lm.Config(),
    "prefix_lm, one stack": prefix_lm.Config(layout="prefix_lm"),
    "denoising": denoising.Config("infill", layout="language_model"),
}


def interleaved(texts: Examples, pairs: Examples, order: np.ndarray) -> Examples:
    """Rows of both, texts first, in another order."""
    row = np.concatenate([texts.row, pairs.row + texts.key.size])
    length = np.concatenate([texts.length, pairs.length])
    joined = Examples(
        tokens=np.concatenate([texts.tokens, pairs.tokens]),
        row=row,
        column=np.concatenate([texts.column, pairs.column]),
        length=length,
        key=mix(np.arange(texts.key.size + pairs.key.size)),
        weight=np.ones(texts.key.size + pairs.key.size, dtype=np.float32),
        isolated=True,
    )
    paired = np.arange(joined.key.size) >= texts.key.size
    return replace(only(joined, order.tolist()), paired=paired[order])


@pytest.mark.parametrize("name", OF)
@pytest.mark.parametrize("policy", ["best_fit", "padded"])
def test_rows_are_those_of_the_two_objectives(name: str, policy: str) -> None:
    of = OF[name]
    config = multi_task.Config(of)
    objective = config.build(VOCABULARY)
    spec = objective.pack_spec(LENGTH)
    own = of.build(VOCABULARY)
    assert replace(spec, of_pairs=None) == own.pack_spec(LENGTH)
    assert spec.of_pairs is not None
    assert spec.sides is not None
    size = spec.sides.size
    beside = seq2seq.Config(target_length=size[1], layout=of.layout)
    assert spec.of_pairs == beside.build(VOCABULARY).pack_spec(size[0])
    assert spec.of_pairs.sides is not None
    assert spec.of_pairs.sides.size == size
    assert (objective.needs, objective.predictions(LENGTH)) == (own.needs, size[1])

    texts, _ = pack([5, 17, 9, 30, 4, 22], own.pack_spec(LENGTH), policy)
    pairs, _ = pack_pairs(beside, size[0], policy)
    number = texts.key.size + pairs.key.size
    order = np.random.default_rng(0).permutation(number)
    examples = interleaved(texts, pairs, order)
    batch = objective.collate(examples, spec.sequence_length)
    for paired, alone in ((False, own), (True, beside.build(VOCABULARY))):
        assert examples.paired is not None
        rows = np.flatnonzero(examples.paired == paired)
        width = size[0] if paired else spec.sequence_length
        expected = alone.collate(only(examples, rows.tolist()), width)
        assert expected.keys() == batch.keys()
        for column, array in expected.items():
            assert np.array_equal(batch[column][rows], array), column


def test_without_marks_all_rows_are_text() -> None:
    """As a plan makes them."""
    of = OF["span_corruption"]
    objective, own = multi_task.Config(of).build(VOCABULARY), of.build(VOCABULARY)
    examples, _ = pack([5, 17, 9], own.pack_spec(LENGTH), "best_fit")
    found, expected = (each.collate(examples, LENGTH) for each in (objective, own))
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


def test_other_objectives_are_rejected() -> None:
    with pytest.raises(ConfigError, match="of is causal_lm, which makes no pairs of texts"):
        multi_task.Config(causal_lm.Config())
