"""Which settings of a configuration differ from their defaults."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

from samestep.config import plain
from samestep.config.decode import kinds_of
from samestep.config.tree import Tree
from samestep.errors import SamestepError

_MISSING = dataclasses.MISSING


def changed(schema: type[object], tree: Tree, default: object = None) -> Iterator[str]:
    """Yields the dotted keys of settings that a user must have set, by their values.

    These have no default or another value than it. So do all settings under a free name, and of a
    kind that cannot be imported. A list counts as one setting.

    Args:
        schema: a dataclass.
        tree: its settings.
        default: an instance of it with the defaults; None takes the defaults of the class.
    """
    assert dataclasses.is_dataclass(schema)
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        if field.name not in tree:
            continue
        if isinstance(default, schema):
            usual = getattr(default, field.name)
        else:
            usual = field.default
            if field.default_factory is not _MISSING:
                usual = field.default_factory()
        yield from _changed(field.name, tree[field.name], hints[field.name], usual)
    for key in tree.keys() - {field.name for field in dataclasses.fields(schema)}:
        yield from leaves(tree[key], key)


def _changed(key: str, value: object, hint: object, usual: object) -> Iterator[str]:
    kinds = kinds_of(hint)
    section = next((part for part in (hint, *typing.get_args(hint)) if _is_section(part)), None)
    if not isinstance(value, dict) or not (kinds or section):
        if plain(usual) != value:
            yield from leaves(value, key)
        return
    inner = dict(value)
    if kinds is not None:
        kind = inner.pop("kind", None)
        try:
            section = kinds.schema(kind, key)
        except SamestepError:  # a module of the user that is not imported
            yield from leaves(value, key)
            return
        if not isinstance(usual, section):
            yield f"{key}.kind"
    assert section is not None
    found = [f"{key}.{name}" for name in changed(section, inner, usual)]
    # A section that is there although the default has none is a change by itself.
    yield from found or (leaves(value, key) if usual is None and kinds is None else ())


def _is_section(part: object) -> typing.TypeGuard[type[object]]:
    return isinstance(part, type) and dataclasses.is_dataclass(part)


def leaves(value: object, key: str) -> Iterator[str]:
    """Yields the dotted keys of all values under a key; an empty section is a value."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}")
    else:
        yield key
