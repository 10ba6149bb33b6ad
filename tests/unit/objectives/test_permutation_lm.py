"""Permutation language modeling: the order, the predictions, and what they depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from samestep.errors import ConfigError
from tests.unit.objectives.test_mlm_sbo import VOCABULARY, examples
from trainer.objectives.kinds.permutation_lm import Config


def test_one_token_in_k_is_predicted_and_nothing_is_masked() -> None:
    objective = Config(k=6).build(VOCABULARY)
    batch = objective.collate(examples(), 64)
    real = ~np.isin(batch["tokens"], VOCABULARY.special)
    used = np.asarray(batch["weights"]) > 0
    expected = np.maximum(1, np.rint(real.sum(1) / 6))
    given = examples().weight > 0
    np.testing.assert_array_equal(used.sum(1)[given], expected[given])
    at = np.asarray(batch["predicted"])
    labels = np.take_along_axis(np.asarray(batch["tokens"]), at, 1)
    np.testing.assert_array_equal(labels, batch["labels"])


def test_the_predicted_tokens_have_an_order() -> None:
    objective = Config().build(VOCABULARY)
    batch = objective.collate(examples(), 64)
    rank, at = np.asarray(batch["rank"]), np.asarray(batch["predicted"])
    for row in range(len(rank)):
        places = np.sort(rank[row][rank[row] > 0])
        np.testing.assert_array_equal(places, np.arange(1, len(places) + 1))
        assert set(np.flatnonzero(rank[row])) == set(at[row]) - {0}


def test_every_order_is_equally_likely() -> None:
    """The first predicted token of a row has each place equally often."""
    objective = Config(k=3, ngrams=1).build(VOCABULARY)
    places = []
    for seed in range(20):
        rows = examples(40)
        rows = replace(rows, key=rows.key + np.uint64(1000 * seed))
        batch = objective.collate(rows, 64)
        rank, at = np.asarray(batch["rank"]), np.asarray(batch["predicted"])
        first = np.take_along_axis(rank, at[:, :1], 1)[:, 0]
        places += ((first - 0.5) / rank.max(1)).tolist()
    share = np.histogram(places, bins=4, range=(0, 1))[0] / len(places)
    np.testing.assert_allclose(share, 0.25, atol=0.05)


def test_a_row_depends_on_its_own_key_alone() -> None:
    objective = Config().build(VOCABULARY)
    whole, batch = examples(8), objective.collate(examples(8), 64)
    again = objective.collate(examples(8), 64)
    np.testing.assert_array_equal(batch["rank"], again["rank"])
    other = objective.collate(replace(whole, key=whole.key + np.uint64(1)), 64)
    assert (np.asarray(other["rank"]) != np.asarray(batch["rank"])).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"k": 0.5}, "k is 0.5"), ({"ngrams": 0}, "ngrams is 0")],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)  # type: ignore[arg-type]
