"""Docstrings as the API reference shows them: names that share an entry get one each."""

from __future__ import annotations

import re

import griffe

_SHARED = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)


class SharedEntries(griffe.Extension):
    """Splits the entry `rank, world_size: ...` of a docstring into two."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = _SHARED.sub(_split, obj.docstring.value)


def _split(entry: re.Match[str]) -> str:
    names = entry["names"].split(", ")
    return "\n".join(f"{entry['indent']}{name}: {entry['text']}" for name in names)
