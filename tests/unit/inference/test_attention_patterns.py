"""Where heads attend: shares counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.inference.attention_patterns import NAMES, Patterns

# [CLS] a b a [SEP]
TOKENS = np.array([1, 7, 8, 7, 2])


def shares(patterns: Patterns) -> dict[str, float]:
    return dict(zip(NAMES, patterns.heads[:, 0, 0].tolist(), strict=True))


def test_each_pattern_is_counted_over_tokens_that_are_not_special() -> None:
    patterns = Patterns(1, 1, 1, 1, sees_all=True)
    attention = np.zeros((1, 1, 5, 5), dtype=np.float32)
    attention[0, 0, 0, 4] = 1  # of [CLS], which does not count
    attention[0, 0, 1, 3] = 1  # the same token
    attention[0, 0, 2, [1, 3]] = 0.5  # previous and next
    attention[0, 0, 3, [0, 3, 4]] = (0.25, 0.25, 0.5)  # [CLS], itself and [SEP]; [SEP] is next, too
    patterns.add(attention, TOKENS)
    expected = (0.5 / 3, (0.5 + 0.5) / 3, 0.25 / 3, 0.25 / 3, 0.5 / 3, 1 / 3)
    assert list(shares(patterns).values()) == pytest.approx(expected)
    # Of 5 positions, each token sees two equal ones in two of three cases.
    uniform = (0.2, 0.2, 0.2, 0.2, 0.2, 2 / 3 / 5)
    assert patterns.uniform.tolist() == pytest.approx(uniform)


def test_a_uniform_decoder_has_the_uniform_shares() -> None:
    patterns = Patterns(1, 1, 1, 0, sees_all=False)
    attention = np.tril(np.ones((4, 4), dtype=np.float32))
    attention /= attention.sum(-1, keepdims=True)
    patterns.add(attention[None, None], np.array([1, 7, 7, 8]))
    assert patterns.heads[:, 0, 0].tolist() == pytest.approx(patterns.uniform.tolist())
    assert shares(patterns)["next"] == 0
    # Token 2 sees token 1, the same one, among three positions.
    assert shares(patterns)["same token"] == pytest.approx(1 / 3 / 3)


def test_a_text_of_special_tokens_counts_not() -> None:
    patterns = Patterns(1, 1, 1, 1, sees_all=True)
    patterns.add(np.full((1, 1, 2, 2), 0.5, dtype=np.float32), np.array([1, 2]))
    assert not patterns.heads.any()
    assert patterns.table([1]).row_count == 3
