"""Settings of the methods, and what is wrong with others."""

from __future__ import annotations

import pytest

from samestep.errors import ConfigError
from trainer.vectors.settings import METHODS, Settings


def test_defaults() -> None:
    assert Settings.of("skipgram", {}).rate == 0.025
    assert Settings.of("cbow", {"rate": None}).rate == 0.05
    assert Settings.of("cbow", {"rate": 0.1}).rate == 0.1
    glove = Settings.of("glove", {})
    assert (glove.epochs, glove.x_max, glove.negatives, glove.subsample) == (25, 100.0, 0, 0.0)
    assert Settings.of("ppmi", {"window": 2}).epochs == 0


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("glove", {"negatives": 3}, "--negatives is 3, and --method glove has no such setting"),
        ("ppmi", {"epochs": 3}, "Leave it out, or use --method skipgram or cbow or glove"),
        ("skipgram", {"x_max": 3.0}, "--x-max is 3.0, and --method skipgram has no"),
        ("skipgram", {"dimensions": 0}, "--dimensions must be at least 1, not 0"),
        ("skipgram", {"window": 0}, "--window must be at least 1, not 0"),
        ("glove", {"window": 21}, "--window must be at most 20, not 21"),
        ("ppmi", {"min_count": 0}, "--min-count must be at least 1, not 0"),
        ("cbow", {"negatives": 0}, "--negatives must be at least 1, not 0"),
        ("glove", {"epochs": 0}, "--epochs must be at least 1, not 0"),
        ("cbow", {"rate": 0.0}, r"--rate must be above 0, not 0\.0"),
        ("glove", {"x_max": float("nan")}, "--x-max must be above 0, not nan"),
        ("cbow", {"subsample": -1.0}, r"--subsample must be in \[0, 1\], not -1\.0"),
        ("ppmi", {"seed": -1}, "--seed must be at least 0, not -1"),
    ],
)
def test_wrong_settings(method: str, given: dict, words: str) -> None:
    assert method in METHODS
    with pytest.raises(ConfigError, match=words):
        Settings.of(method, given)
