"""Strategies for hostile files: valid ones in which values or bytes were replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.fuzz.trial import Files

_CONTAINERS = [
    *("[]", "{}", "[[]]", "[{}]", '{"": null}', '{"0": 0}', '["x"]', "[1, 2]"),
    *("[" * 400 + "]" * 400, f"[{'0, ' * 299}0]"),
]
NUMBERS = [
    *(0, 1, -1, 2, 7, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(10**6, 10**9, 10**12, 10**30, 10**400, -(2**31), -(2**63)),
]
_FLOATS = [0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 1e9, 3.0]
_TEXTS = [
    *("", "x", "0", "-1", "1e9", "true", "null", "..", "../x", "/etc/passwd", "a/b", "C:\\x", "\0"),
    *(
        "\ud800",
        "é",
        "\u202e",
        "\x1b[2J",
        "x" * 5000,
        "{",
        "[",
        "bert.payload",
        "os",
        "<s>",
        "[UNK]",
    ),
    *("hf://a/b", "http://127.0.0.1:9/x", "s3://b/k", "file:///etc/passwd", "(a+)+$", "(?P<", "\\"),
]
values: SearchStrategy[Any] = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(_TEXTS),
    st.sampled_from(_FLOATS),
    st.sampled_from([True, False, None]),
    st.sampled_from(_CONTAINERS).map(json.loads),  # a new one each time: later changes go into it
    st.integers(),
    st.text(max_size=8),
)
"""Values that a reader may not expect."""


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in a tree of JSON."""
    found = []
    todo = [tree]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    return found


def trees(*seeds: Any, most: int = 3) -> SearchStrategy[Any]:
    """A tree of JSON, some of whose values were replaced, removed, repeated or exchanged."""
    return _trees([json.dumps(seed) for seed in seeds], most)


@st.composite
def _trees(draw: DrawFn, texts: list[str], most: int) -> Any:
    tree = json.loads(draw(st.sampled_from(texts)))
    for _ in range(draw(st.integers(0, most))):
        found = places(tree)
        if not found:
            return draw(values)
        node, key = found[draw(st.integers(0, len(found) - 1))]
        kind = draw(st.sampled_from(["value"] * 6 + ["remove", "swap", "number", "repeat", "add"]))
        if kind == "value":
            node[key] = draw(values)
        elif kind == "number":
            old = node[key]
            node[key] = old + draw(st.sampled_from(NUMBERS)) if type(old) is int else str(old)
        elif kind == "remove":
            del node[key]
        elif kind == "swap":
            other, name = found[draw(st.integers(0, len(found) - 1))]
            node[key] = copy.deepcopy(other[name])
        elif kind == "repeat" and isinstance(node, list):
            most = 1000 if len(found) < 1000 else 1
            node[key:key] = [node[key]] * draw(st.sampled_from([1, 2, most]))
        elif isinstance(node, dict):
            node[draw(st.sampled_from(_TEXTS))] = draw(values)
    return tree


def dumped(tree: Any) -> bytes:
    """A tree as JSON, which may have lone surrogates, NaN and huge integers."""
    return json.dumps(tree).encode()


def jsons(*seeds: Any, most: int = 3) -> SearchStrategy[bytes]:
    """JSON like the seeds; sometimes damaged as text."""
    plain = trees(*seeds, most=most).map(dumped)
    return st.one_of(plain, plain, plain, blobs(*map(dumped, seeds)))


@st.composite
def blobs(draw: DrawFn, *seeds: bytes, most: int = 6) -> bytes:
    """Bytes like the seeds, with some of them flipped, overwritten, cut, repeated or inserted."""
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 16, 64, 512]))
        kind = draw(
            st.sampled_from(["flip", "flip", "number", "number", "cut", "end", "repeat", "in"])
        )
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            size = draw(st.sampled_from([1, 2, 4, 8]))
            order = draw(st.sampled_from(["little", "big"]))
            number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * size)
            content[at : at + size] = number.to_bytes(size, order)
        elif kind == "cut":
            del content[at : at + length]
        elif kind == "end":
            del content[at:]
        elif kind == "repeat":
            content[at:at] = content[at : at + length] * draw(st.sampled_from([1, 2, 300]))
        else:
            content[at:at] = draw(st.binary(max_size=12))
    return bytes(content)


@st.composite
def one_of(draw: DrawFn, files: Files, changed: Mapping[str, SearchStrategy[bytes]]) -> Files:
    """Files of which one, sometimes two, are generated."""
    names = draw(st.lists(st.sampled_from(sorted(changed)), min_size=1, max_size=2, unique=True))
    return {**files, **{name: draw(changed[name]) for name in names}}


def named(name: str, content: SearchStrategy[bytes]) -> SearchStrategy[Files]:
    """A single file."""
    return content.map(lambda each: {name: each})
