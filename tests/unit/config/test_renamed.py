"""Old words: what was stored with them is read in new words, and a recipe with one is told the new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config import decode, renamed
from trainer.config.renamed import read_stored
from trainer.errors import ConfigError
from trainer.models import bert


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"model": {"kind": "bert", "head": "span"}}, {"model": {"kind": "bert", "head": "question_answering"}}),
        ({"model": {"head": "tagging", "labels": ["span"]}}, {"model": {"head": "tagging", "labels": ["span"]}}),
        (
            {"settings": {"limit": 1, "task": {"target": "tags", "labels": ["class"]}}},
            {"settings": {"limit": 1, "task": {"target": "tagging", "labels": ["class"]}}},
        ),
        ({"settings": {"task": None}}, {"settings": {"task": None}}),
        ({"model": "bert", "head": "span"}, {"model": "bert", "head": "span"}),
        ({"model": {"head": None}}, {"model": {"head": None}}),
        ({}, {}),
    ],
)
def test_only_the_settings_that_had_an_old_word_are_read_anew(stored: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(stored)
    assert renamed.current(stored) == expected
    assert list(renamed.current(stored)) == list(stored)
    assert repr(stored) == before
    assert renamed.first_words(expected) == stored


def test_the_settings_of_a_run_are_read_and_overrides_laid_over_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {kind: bert, head: span, layers: 2}\nseed: 1\n")
    expected = {"model": {"kind": "bert", "head": "question_answering", "layers": 3}, "seed": 1}
    assert read_stored(path, ["model.layers=3"]) == expected
    assert read_stored(path, ["model.head=span"])["model"]["head"] == "span"  # a user's, which is refused later


@pytest.mark.parametrize("path", ["model", "runs/old/config.yaml: model"])
def test_a_recipe_is_told_the_new_word(path: str) -> None:
    with pytest.raises(ConfigError, match=f"^{path}.head is 'span', which is now called 'question_answering'; set "):
        decode(bert.Config, {"vocab_size": 64, "head": "span"}, path)
    with pytest.raises(ConfigError, match="head must be one of language_model, classification"):
        decode(bert.Config, {"vocab_size": 64, "head": "spam"}, path)
