"""Hostile variants of a JSON document, from a seed: what a stranger or a broken disk may leave."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_VALUES: tuple[object, ...] = (
    *(None, True, 0, -1, 7, 2**31, 2**63, 10**30, 10**400, 0.5, -1.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "7", "\0", "\ud800", "../x", "x" * 5000),
    *([], {}, [[]], [0], ["x"], [None], {"": 0}, {"x": {}}, [[0, 1]], [{"x": 1}]),
)
_DEEP = "[" * 20_000 + "]" * 20_000
_LONG = "9" * 5000
_HOLE = "a hole that text is put into"


def variants(document: str, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yields variants of a JSON document with what was done; first those of the document itself."""
    content, tree = document.encode(), json.loads(document)
    yield from (
        ("empty", b""),
        ("no JSON", b"\0\0\0"),
        ("not UTF-8", content[: len(content) // 2] + b"\xff" + content[len(content) // 2 :]),
        ("deep", _DEEP.encode()),
        ("long", _LONG.encode()),
        ("UTF-16", document.encode("utf-16")),
    )
    for value in ([], {}, None, 5, "x", float("nan")):
        yield f"{value!r} instead", json.dumps(value).encode()
    chance = random.Random(seed)
    places = list(_places(tree, ()))
    for _ in range(count):
        kind = chance.randrange(8)
        place = chance.choice(places)
        if kind == 0:
            end = chance.randrange(len(content))
            yield f"cut at {end}", content[:end]
        elif kind == 1:
            place = chance.choice([p for p in places if isinstance(_at(tree, p), dict)] or [()])
            text = json.dumps(_replaced(tree, place, _HOLE))
            own = json.dumps(_at(tree, place))
            twice = own[:-1] + ("," if len(own) > 2 else "") + own[1:]
            yield f"{place} with keys twice", text.replace(json.dumps(_HOLE), twice).encode()
        elif kind == 2 and place:
            yield f"without {place}", json.dumps(_without(tree, place)).encode()
        elif kind == 3:
            text = json.dumps(_replaced(tree, place, _HOLE))
            name, hostile = chance.choice([("deep", _DEEP), ("long", _LONG), ("1e999", "1e999")])
            yield f"{place} {name}", text.replace(json.dumps(_HOLE), hostile).encode()
        else:
            value = chance.choice(_VALUES)
            text = json.dumps(_replaced(tree, place, value))
            yield f"{place} = {value!r:.40}", text.encode()


def _places(tree: object, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(value, (*place, key))


def _at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _replaced(tree: Any, place: tuple[Any, ...], value: object) -> Any:
    if not place:
        return value
    copy = json.loads(json.dumps(tree))
    _at(copy, place[:-1])[place[-1]] = value
    return copy


def _without(tree: Any, place: tuple[Any, ...]) -> Any:
    copy = json.loads(json.dumps(tree))
    del _at(copy, place[:-1])[place[-1]]
    return copy
