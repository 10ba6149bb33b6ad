"""Windows, skipped words and negative examples of word2vec."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.vectors.corpora import random_text
from trainer.vectors.windows import Negatives, Windows, keep_probabilities, windows

V, REACH = 20, 4
TEXT = random_text(3000, V, seed=1)
KEEP_ALL = np.ones(V)


def pairs(found: Windows) -> list[tuple[int, int]]:
    return list(zip(found.center.tolist(), found.context.tolist(), strict=True))


def test_pairs_are_in_one_document_and_within_reach() -> None:
    found = windows(TEXT, 0, KEEP_ALL, REACH, seed=0, epoch=0)
    document = np.cumsum(TEXT == -1)[TEXT != -1]
    assert np.array_equal(found.words, TEXT[TEXT != -1])
    distance = found.context - found.center
    assert set(np.abs(distance)) == set(range(1, REACH + 1))
    assert (document[found.center] == document[found.context]).all()
    assert pairs(found) == sorted(pairs(found))
    # A center's window is as wide on both sides, as far as its document reaches: what is inside is
    # there, without holes.
    there = set(pairs(found))
    for center, context in there:
        step = 1 if context > center else -1
        assert all((center, near) in there for near in range(center + step, context, step))
        other = 2 * center - context
        inside = 0 <= other < len(document) and document[other] == document[center]
        assert ((center, other) in there) == inside


def test_each_reach_is_as_frequent() -> None:
    found = windows(random_text(40_000, V, 2), 0, KEEP_ALL, REACH, seed=0, epoch=0)
    reach = np.zeros(len(found.words))
    np.maximum.at(reach, found.center, np.abs(found.context - found.center))
    shares = np.bincount(reach.astype(int), minlength=REACH + 1)[1:] / len(reach)
    assert shares == pytest.approx(1 / REACH, abs=0.01)


def test_blocks_of_a_text_have_the_choices_of_their_positions() -> None:
    """A block gives the same windows wherever else the text is cut, except at its borders."""
    keep = keep_probabilities(np.bincount(TEXT[TEXT >= 0], minlength=V), 0.02)
    whole = windows(TEXT, 0, keep, REACH, 3, 1)
    block = windows(TEXT[1000:2000], 1000, keep, REACH, 3, 1)
    before = len(windows(TEXT[:1000], 0, keep, REACH, 3, 1).words)
    inside = {
        (center - before, context - before)
        for center, context in pairs(whole)
        if before <= min(center, context) and max(center, context) < before + len(block.words)
    }
    assert set(pairs(block)) == inside
    assert np.array_equal(whole.keys[before : before + len(block.keys)], block.keys)


def test_seed_and_epoch_change_the_choices() -> None:
    first = windows(TEXT, 0, KEEP_ALL, REACH, seed=0, epoch=0)
    assert pairs(first) == pairs(windows(TEXT, 0, KEEP_ALL, REACH, seed=0, epoch=0))
    for seed, epoch in ((1, 0), (0, 1)):
        other = windows(TEXT, 0, KEEP_ALL, REACH, seed=seed, epoch=epoch)
        assert pairs(other) != pairs(first)
        assert not np.intersect1d(other.keys, first.keys).size


def test_frequent_words_are_skipped_as_often_as_they_should() -> None:
    text = random_text(60_000, V, seed=4)
    counts = np.bincount(text[text >= 0], minlength=V)
    keep = keep_probabilities(counts, 0.01)
    f = counts / counts.sum()
    assert keep == pytest.approx(np.minimum(1, (np.sqrt(f / 0.01) + 1) * 0.01 / f))
    assert keep[0] < 0.3
    assert keep[-1] == 1
    found = windows(text, 0, keep, REACH, seed=0, epoch=0)
    kept = np.bincount(found.words, minlength=V) / counts
    assert kept == pytest.approx(keep, abs=0.03)
    assert keep_probabilities(counts, 0.0).min() == 1


@pytest.mark.parametrize("text", [[], [-1], [-1, -1], [3], [3, -1], [3, -1, 3]])
def test_texts_without_pairs(text: list[int]) -> None:
    found = windows(np.array(text, np.int32), 0, KEEP_ALL, REACH, seed=0, epoch=0)
    assert not len(found.center)
    assert len(found.words) == sum(number >= 0 for number in text)


def test_negatives_have_the_powers_of_the_counts() -> None:
    counts = np.array([1000, 500, 100, 10, 1])
    keys = np.arange(40_000, dtype=np.uint64)
    drawn = Negatives(counts)(keys, 5)
    assert drawn.shape == (40_000, 5)
    shares = np.bincount(drawn.ravel(), minlength=5) / drawn.size
    expected = counts**0.75 / (counts**0.75).sum()
    assert shares == pytest.approx(expected, rel=0.06)
    # The columns are choices of their own, and each key has its own.
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] == pytest.approx(0, abs=0.02)
    assert not np.array_equal(drawn[:-1], drawn[1:])
