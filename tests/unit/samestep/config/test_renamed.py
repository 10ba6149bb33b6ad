"""Names in digests: they never change. A recipe with one is rejected with the setting's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.config import decode, renamed
from samestep.errors import ConfigError
from samestep.untrusted import read_stored
from trainer.models.families import bert


@pytest.mark.parametrize(
    ("tree", "in_digests"),
    [
        (
            {"model": {"kind": "bert", "head": "question_answering"}},
            {"model": {"kind": "bert", "head": "span"}},
        ),
        (
            {"model": {"head": "tagging", "labels": ["question_answering"]}},
            {"model": {"head": "tagging", "labels": ["question_answering"]}},
        ),
        (
            {"settings": {"limit": 1, "task": {"target": "tagging", "labels": ["regression"]}}},
            {"settings": {"limit": 1, "task": {"target": "tags", "labels": ["regression"]}}},
        ),
        ({"settings": {"task": None}}, {"settings": {"task": None}}),
        (
            {"objective": {"kind": "distillation", "positions": "all", "soft": 1.0}, "seed": 1},
            {"objective": {"kind": "distillation", "cells": "all", "soft": 1.0}, "seed": 1},
        ),
        (
            {"phases": [{"objective": {"positions": "all"}}, {"steps": 3, "objective": None}]},
            {"phases": [{"objective": {"cells": "all"}}, {"steps": 3, "objective": None}]},
        ),
        ({"model": "bert", "head": "span"}, {"model": "bert", "head": "span"}),
        ({"model": {"head": None}}, {"model": {"head": None}}),
        ({}, {}),
    ],
)
def test_only_settings_with_another_name_in_digests_change(
    tree: dict[str, Any], in_digests: dict[str, Any]
) -> None:
    before = repr(tree)
    assert renamed.original(tree) == in_digests
    assert list(renamed.original(tree)) == list(tree)
    assert repr(tree) == before


def test_a_stored_run_without_a_newer_setting_has_what_it_did() -> None:
    current = renamed.current({"training": {"steps": 3}})
    assert current == {"training": {"dropout_version": 1, "steps": 3}}
    named = {"training": {"steps": 3, "dropout_version": 2}}
    assert renamed.current(named) == named


def test_overrides_of_a_stored_config_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {kind: bert, head: tagging, layers: 2}\nseed: 1\n")
    expected = {"model": {"kind": "bert", "head": "tagging", "layers": 3}, "seed": 1}
    assert read_stored(path, ["model.layers=3"]) == expected


@pytest.mark.parametrize("path", ["model", "runs/old/config.yaml: model"])
def test_a_recipe_is_rejected_with_the_new_name(path: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{path}.head is 'span', which is now called 'question_answering'; set "
    ):
        decode(bert.Config, {"vocab_size": 64, "head": "span"}, path)
    with pytest.raises(ConfigError, match="head must be one of language_model, classification"):
        decode(bert.Config, {"vocab_size": 64, "head": "spam"}, path)
