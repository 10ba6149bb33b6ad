"""Settings of stored files: names and values that changed, and settings newer than a file.

Stored files (checkpoints, run folders, manifests of datasets) may hold an old name and are read
with the new one. A user's recipe with an old name is rejected with a message that gives the new
one. Stored digests are computed from the old names, so they never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samestep.config.tree import Tree, parse_file
from samestep.errors import ConfigError

_RENAMED: Mapping[str, Mapping[str, str]] = {
    "model.head": {"span": "question_answering"},
    "settings.task.target": {  # of a dataset's manifest
        "class": "classification",
        "number": "regression",
        "choice": "multiple_choice",
        "tags": "tagging",
        "span": "question_answering",
    },
}
"""Old name to new name, by setting."""

_RENAMED_KEYS: Mapping[str, Mapping[str, str]] = {"objective": {"cells": "positions"}}
"""Old key to new key, by section of an experiment or of one of its phases."""


_NEWER: Mapping[str, Mapping[str, int]] = {"training": {"dropout_version": 1}}
"""What runs did before a setting existed, by section, where that is not the default now."""


def stored(content: bytes, path: Path) -> Tree:
    """Returns the settings in a run's config.yaml, with current names.

    Raises:
        ConfigError: it is not valid, or names base files, which a stranger's would lead anywhere.
    """
    tree = parse_file(content, path)
    if "base" in tree:
        raise ConfigError(
            f"{path} has base, and a run's own configuration holds all settings itself. Copy the "
            "folder of the run again, or remove the line"
        )
    return current(tree)


def current(stored: Tree) -> Tree:
    """Returns a copy of a stored tree with current names, and with settings that it lacks."""
    for setting, names in _RENAMED.items():
        stored = _replaced(stored, setting.split("."), names)
    for section, keys in _RENAMED_KEYS.items():
        stored = _with_keys(stored, section, keys)
    for section, values in _NEWER.items():
        if isinstance(own := stored.get(section), dict):
            stored = {**stored, section: {**values, **own}}
    return stored


def original(tree: Tree) -> Tree:
    """Returns a copy of a tree with the original names, the inverse of `current`; for digests."""
    for setting, names in _RENAMED.items():
        old_names = {new: old for old, new in names.items()}
        tree = _replaced(tree, setting.split("."), old_names)
    for section, keys in _RENAMED_KEYS.items():
        tree = _with_keys(tree, section, {new: old for old, new in keys.items()})
    return tree


def new_name(setting: str, value: object) -> str | None:
    """Returns the new name of an old value of a setting, or None. `setting` may have a prefix."""
    for name, names in _RENAMED.items():
        ends = f" {setting}".endswith((f".{name}", f" {name}"))
        if ends and isinstance(value, str):
            return names.get(value)
    return None


def _with_keys(tree: Tree, section: str, names: Mapping[str, str]) -> Tree:
    """Replaces keys of a section, also in phases; their order stays."""
    if isinstance(own := tree.get(section), dict):
        tree = {**tree, section: {names.get(key, key): value for key, value in own.items()}}
    if isinstance(phases := tree.get("phases"), list):
        inner = [_with_keys(e, section, names) if isinstance(e, dict) else e for e in phases]
        tree = {**tree, "phases": inner}
    return tree


def _replaced(tree: Tree, keys: list[str], names: Mapping[str, str]) -> Tree:
    key, *inner = keys
    value = tree.get(key)
    if inner and isinstance(value, dict):
        return {**tree, key: _replaced(value, inner, names)}
    if not inner and isinstance(value, str) and value in names:
        return {**tree, key: names[value]}
    return tree
