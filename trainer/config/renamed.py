"""Words of settings that have been renamed.

Checkpoints, run folders and datasets that were written with an old word are read with the new one. A recipe is not:
it is refused, and the message names the new word. Digests that are stored and compared go by the old words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.config.tree import Tree, merge, parse_override, read_tree

_NEW_WORDS: Mapping[str, Mapping[str, str]] = {
    "model.head": {"span": "question_answering"},
    "settings.task.target": {  # of a dataset's manifest
        "class": "classification",
        "number": "regression",
        "choice": "multiple_choice",
        "tags": "tagging",
        "span": "question_answering",
    },
}
"""The new word for each old one, by setting."""


def read_stored(path: str | Path, overrides: Iterable[str] = ()) -> Tree:
    """Reads the config.yaml of a run in current words; overrides are a user's, and laid over it as they are."""
    tree = current(read_tree(path))
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return tree


def current(stored: Tree) -> Tree:
    """A stored tree in current words; the argument stays as it is."""
    for setting, words in _NEW_WORDS.items():
        stored = _replaced(stored, setting.split("."), words)
    return stored


def first_words(tree: Tree) -> Tree:
    """A tree in the words that it was first stored in: digests of it stay the same when a word is renamed."""
    for setting, words in _NEW_WORDS.items():
        tree = _replaced(tree, setting.split("."), {new: old for old, new in words.items()})
    return tree


def word_now(setting: str, word: object) -> str | None:
    """The new word for an old one, where `setting` ends with the name of a setting that had it."""
    for name, words in _NEW_WORDS.items():
        if isinstance(word, str) and (setting == name or setting.endswith((f".{name}", f" {name}"))):
            return words.get(word)
    return None


def _replaced(tree: Tree, keys: list[str], words: Mapping[str, str]) -> Tree:
    key, *inner = keys
    value = tree.get(key)
    if inner and isinstance(value, dict):
        return {**tree, key: _replaced(value, inner, words)}
    if not inner and isinstance(value, str) and value in words:
        return {**tree, key: words[value]}
    return tree
