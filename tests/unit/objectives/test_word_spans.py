"""Runs of words to mask, against the algorithm written down row by row."""

from __future__ import annotations

import time

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import combine, mix, name_key, uniform
from trainer.objectives.kinds import mlm
from trainer.objectives.word_spans import (
    choose_spans,
    geometric_probabilities,
    ngram_probabilities,
)


def slow(
    key: np.uint64, maskable: list[bool], continuing: list[bool], budget: int, likely: np.ndarray
) -> list[int]:
    words: list[list[int]] = []
    for at, usable in enumerate(maskable):
        if usable and continuing[at] and at and maskable[at - 1]:
            words[-1].append(at)
        elif usable:
            words.append([at])
    start, length = name_key("mlm.span.start"), name_key("mlm.span.length")
    found, taken = [0] * len(maskable), set[int]()
    order = sorted(range(len(words)), key=lambda w: int(combine(key, start, words[w][0])[0]))
    for number, first in enumerate(order, start=1):
        u = uniform(combine(key, length, words[first][0]))[0]
        wanted = 1 + int((np.cumsum(likely)[:-1] <= u).sum())
        for w in range(first, min(first + wanted, len(words))):
            gap = w > first and words[w][0] != words[w - 1][-1] + 1
            if gap or w in taken or len(words[w]) > budget:
                break
            taken.add(w)
            budget -= len(words[w])
            for at in words[w]:
                found[at] = number
    return found


@pytest.mark.parametrize("likely", [ngram_probabilities(3), geometric_probabilities(0.2, 10)])
@pytest.mark.parametrize("whole_words", [True, False])
def test_spans_are_those_of_the_slow_algorithm(likely: np.ndarray, whole_words: bool) -> None:
    random = np.random.default_rng(0)
    maskable = random.random((40, 60)) < 0.9
    maskable[3] = False
    continuing = random.random((40, 60)) < 0.4
    if not whole_words:
        continuing[:] = False
    budget = random.integers(0, 15, 40)
    key = mix(np.arange(40))
    found = choose_spans(key, maskable, continuing if whole_words else None, budget, likely)
    for row in range(40):
        expected = slow(
            key[row : row + 1],
            maskable[row].tolist(),
            continuing[row].tolist(),
            int(budget[row]),
            likely,
        )
        assert found[row].tolist() == expected
    assert ((found > 0).sum(1) <= budget).all()


def test_lengths_have_their_distributions() -> None:
    assert ngram_probabilities(3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    likely = geometric_probabilities(0.2, 10)
    assert likely[1] / likely[0] == pytest.approx(0.8)
    assert likely @ np.arange(1, 11) == pytest.approx(3.8, abs=0.01)
    # The first span of a row is cut by the end of the row alone.
    key = mix(np.arange(4000))
    spans = choose_spans(key, np.ones((4000, 200), dtype=bool), None, np.full(4000, 10), likely)
    assert (spans == 1).sum(1).mean() == pytest.approx(3.8, abs=0.15)


def test_rows_do_not_depend_on_their_batch() -> None:
    random = np.random.default_rng(1)
    maskable, key = random.random((9, 50)) < 0.8, mix(np.arange(9))
    likely, budget = ngram_probabilities(3), np.full(9, 7)
    whole = choose_spans(key, maskable, None, budget, likely)
    for row in range(9):
        one = slice(row, row + 1)
        alone = choose_spans(key[one], maskable[one], None, budget[one], likely)
        assert np.array_equal(alone[0], whole[row])


def test_ngrams_of_words_are_masked() -> None:
    vocabulary = Vocabulary(100, 0, 1, 2, 3, (0, 1, 2, 3), continuing=tuple(range(60, 100)))
    objective = mlm.Config(whole_words=True, ngrams=3).build(vocabulary)
    assert isinstance(objective, mlm.MaskedLM)
    tokens = np.random.default_rng(0).integers(4, 100, (500, 128)).astype(np.int32)
    tokens[:, 0], tokens[:, -1] = 1, 2
    original = tokens.copy()
    predicted, labels, used = objective.mask(tokens, mix(np.arange(500)))
    assert np.array_equal(np.take_along_axis(original, predicted, 1)[used], labels[used])
    chosen = np.zeros(tokens.shape, dtype=bool)
    chosen[np.nonzero(used)[0], predicted[used]] = True
    # Whole words: no token continues a word of which only a part is chosen.
    inside = (original[:, 1:] >= 60) & (original[:, :-1] > 3)
    assert (chosen[:, 1:] == chosen[:, :-1])[inside].all()
    # All but the last words of a row's budget of 19 are used.
    assert 17 < used.sum(1).mean() <= 19


def test_a_length_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ngrams is 0\. Use 1 to 100"):
        mlm.Config(ngrams=0)


def test_speed() -> None:
    maskable = np.ones((64, 512), dtype=bool)
    continuing = np.random.default_rng(0).random((64, 512)) < 0.3
    begin = time.process_time()
    choose_spans(mix(np.arange(64)), maskable, continuing, np.full(64, 77), ngram_probabilities(3))
    assert time.process_time() - begin < 0.5  # measured: 0.02 s
