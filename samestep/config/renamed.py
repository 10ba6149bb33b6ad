"""Settings with one name in files and another in digests, and a default of stored runs.

Finished fine-tuning runs, unfinished builds and packings are identified by digests, which are in
checkpoints and ledgers and so must never change. They are computed from the first names that some
settings had.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samestep.config.tree import Tree, parse_file
from samestep.errors import ConfigError

_IN_DIGESTS: Mapping[str, Mapping[str, str]] = {
    "model.head": {"question_answering": "span"},
    "settings.task.target": {  # of a dataset's manifest
        "classification": "class",
        "regression": "number",
        "multiple_choice": "choice",
        "tagging": "tags",
        "question_answering": "span",
    },
}
"""Name of a value to its name in digests, by setting."""

_KEYS_IN_DIGESTS: Mapping[str, Mapping[str, str]] = {"objective": {"positions": "cells"}}
"""Key to its name in digests, by section of an experiment or of one of its phases."""

_STORED_DEFAULTS: Mapping[str, Mapping[str, int]] = {"training": {"dropout_version": 1}}
"""Values of settings that a run's files leave out, by section, where new runs have other ones."""


def stored(content: bytes, path: Path) -> Tree:
    """Returns the settings in a run's config.yaml.

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
    """Returns a copy of a stored tree with the values of settings that it leaves out."""
    for section, values in _STORED_DEFAULTS.items():
        if isinstance(own := stored.get(section), dict):
            stored = {**stored, section: {**values, **own}}
    return stored


def original(tree: Tree) -> Tree:
    """Returns a copy of a tree with the names that digests are computed from."""
    for setting, names in _IN_DIGESTS.items():
        tree = _replaced(tree, setting.split("."), names)
    for section, keys in _KEYS_IN_DIGESTS.items():
        tree = _with_keys(tree, section, keys)
    return tree


def new_name(setting: str, value: object) -> str | None:
    """Returns the name of a value that is only in digests, or None. `setting` may have a prefix."""
    for name, names in _IN_DIGESTS.items():
        if f" {setting}".endswith((f".{name}", f" {name}")):
            return next((new for new, in_digests in names.items() if in_digests == value), None)
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
