"""Strict configuration: frozen dataclasses, YAML files with `base:`, and `key=value` overrides.

    experiment = load(Experiment, "configs/debug/bert_mini.yaml", ["optimizer.lr=1e-3"])

Precedence: dataclass default < `base:` < file < override. A section whose field is annotated with
`Kinds("package")` is decoded by the module that its `kind` names: `kind: mlm` under
"trainer.objectives.kinds" is `trainer/objectives/kinds/mlm.py`, a dotted kind is a user's own
module. Each such module has a frozen dataclass `Config`. Nothing in this package imports torch.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import TypeVar

import yaml

from samestep.config.decode import Kinds, decode, kind_name, kinds_of
from samestep.config.tree import Tree, check_addresses, differences, read_tree
from samestep.errors import ConfigError

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B")

__all__ = [
    "Kinds",
    "Tree",
    "decode",
    "differences",
    "dump",
    "kind_name",
    "load",
    "parse_size",
    "read_tree",
    "to_tree",
]


def load(schema: type[T], path: str, overrides: Sequence[str] = ()) -> T:
    """Reads a file, its bases and the overrides into `schema`.

    Raises:
        ConfigError: names the file or the key, the value and the nearest valid key.
    """
    return decode(schema, read_tree(path, overrides))


def to_tree(config: object) -> Tree:
    """Returns all values of a dataclass by key, defaults and each section's `kind` included."""
    assert dataclasses.is_dataclass(config)
    hints = typing.get_type_hints(type(config), include_extras=True)
    tree: Tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A section's class does not say its kind; the module that defines it does.
        kinds = kinds_of(hints[field.name])
        tree[field.name] = plain(value)
        if kinds is not None and value is not None:
            tree[field.name] = {"kind": kinds.kind_of(value), **tree[field.name]}
    return tree


def plain(value: object) -> object:
    """Returns a value of a configuration as YAML writes it: sections, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return to_tree(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def dump(config: object) -> str:
    """Returns the resolved configuration as YAML, in the order of the schema.

    Raises:
        ConfigError: an address has a credential, as a program that uses samestep may have set it.
    """
    tree = to_tree(config)
    check_addresses(tree)
    return yaml.safe_dump(tree, sort_keys=False, width=120, allow_unicode=True)


def parse_size(text: str, name: str) -> int:
    """Converts a size to bytes: kB, MB, GB, ... are powers of 1000, KiB, MiB, ... of 1024.

    Args:
        name: setting of this value, for the message.

    Raises:
        ConfigError: the text is no size, or it is less than a byte.
    """
    size = 0
    if match := _SIZE.fullmatch(text.strip()):
        number, prefix, binary = match.groups()
        power = " KMGTP".index(prefix.upper()) if prefix else 0
        size = int(float(number) * (1024 if binary else 1000) ** power)
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 500MB, 1.5GB or 2GiB, not {text!r}")
    return size
