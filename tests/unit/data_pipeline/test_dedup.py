"""Signatures of documents, and which documents repeat earlier ones."""

import numpy as np
import pytest

from data_pipeline.dedup import Config
from data_pipeline.dedup.kinds import exact, minhash
from samestep.errors import ConfigError

TEXT = " ".join(f"w{i}" for i in range(100))


def earlier(config: Config, *texts: str) -> list[int]:
    found = config.earlier(np.stack([config.signature(text) for text in texts]))
    return [int(number) for number in found]


def test_equal_texts_repeat_the_first_one() -> None:
    assert earlier(exact.Config(), "b", "a", "b", "c", "a", "b") == [-1, -1, 0, -1, 1, 0]
    assert earlier(exact.Config(), "a", "a ", "A") == [-1, -1, -1]


def test_similar_texts_repeat_the_first_one() -> None:
    other = " ".join(f"v{i}" for i in range(100))
    near = TEXT.replace("w50", "x")  # 5 of 96 n-grams are others: a similarity of 91/101
    far = " ".join(f"w{i}" if i % 10 else "x" for i in range(100))
    found = earlier(minhash.Config(), other, TEXT, near, far, f"{TEXT.upper()}!", other)
    assert found == [-1, -1, 1, -1, 1, 0]


def test_the_threshold_decides() -> None:
    half = " ".join(f"w{i}" for i in range(75))  # 71 of 96 n-grams: 0.74
    assert earlier(minhash.Config(threshold=0.6), TEXT, half) == [-1, 0]
    assert earlier(minhash.Config(threshold=0.9), TEXT, half) == [-1, -1]


def test_estimates_have_the_stated_error() -> None:
    """Of 200 pairs with a similarity of 1/3, in standard errors of 0.5 / sqrt(256) at most."""
    config = minhash.Config(permutations=256)
    estimates = []
    for pair in range(200):
        words = [f"p{pair}w{i}" for i in range(104)]
        one, two = (config.signature(" ".join(part)) for part in (words[:54], words[25:79]))
        estimates.append(np.mean(one == two))  # 25 n-grams in common, of 75
    assert np.mean(estimates) == pytest.approx(1 / 3, abs=0.01)
    assert np.std(estimates) < 0.5 / 16


def test_short_texts_have_signatures() -> None:
    assert earlier(minhash.Config(), "one", "two", "One.", "!!", "??", "!!") == [
        -1,
        -1,
        0,
        -1,
        -1,
        3,
    ]


def test_settings_that_make_no_sense() -> None:
    for name, value in {"threshold": 1.5, "ngram": 0, "permutations": 4}.items():
        with pytest.raises(ConfigError, match=f"dedup.{name} is {value}. Use"):
            minhash.Config(**{name: value})
