"""Turns decoded configuration back into plain values and YAML that decode to the same."""

from __future__ import annotations

import dataclasses
import typing

import yaml

from samestep.config.decode import kinds_of
from samestep.config.tree import Tree, check_addresses


def to_tree(config: object) -> Tree:
    """Returns all values of a dataclass by key, defaults and each section's `kind` included."""
    assert dataclasses.is_dataclass(config)
    hints = typing.get_type_hints(type(config), include_extras=True)
    tree: Tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A section's class does not say its kind; the module that defines it does.
        kinds = kinds_of(hints[field.name])
        tree[field.name] = _plain(value)
        if kinds is not None and value is not None:
            tree[field.name] = {"kind": kinds.kind_of(value), **tree[field.name]}
    return tree


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return to_tree(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def dump(config: object) -> str:
    """Returns the resolved configuration as YAML, in the order of the schema.

    Raises:
        ConfigError: an address has a credential, as a program that uses samestep may have set it.
    """
    tree = to_tree(config)
    check_addresses(tree)
    return yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)
