"""Which settings differ from the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from samestep.config import Kinds, decode, own_modules, to_tree
from samestep.config.changes import changed


@dataclass(frozen=True)
class Inner:
    size: int = 3
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    output: str
    dedup: Annotated[Any, Kinds("data_pipeline.dedup.kinds")] | None = None
    inner: Inner = field(default_factory=lambda: Inner(size=5))
    extra: Inner | None = None
    free: dict[str, Inner] = field(default_factory=dict)
    rate: float = 1.0


def changes(**settings: Any) -> list[str]:
    tree = to_tree(decode(Outer, {"output": "x", **settings}))
    found = list(changed(Outer, tree))
    assert found[0] == "output"  # it has no default
    return found[1:]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"rate": 1}, []),
        ({"rate": 0.5}, ["rate"]),
        # The section's own default counts, rather than its class's.
        ({"inner": {"size": 5}}, []),
        ({"inner": {"size": 3}}, ["inner.size"]),
        ({"inner": {"size": 5, "names": ["a"]}}, ["inner.names"]),
        ({"extra": {}}, ["extra.size", "extra.names"]),
        ({"extra": {"size": 4}}, ["extra.size"]),
        ({"free": {"a": {"size": 3}}}, ["free.a.size", "free.a.names"]),
        ({"dedup": "exact"}, ["dedup.kind"]),
        ({"dedup": {"kind": "minhash", "threshold": 0.75}}, ["dedup.kind", "dedup.threshold"]),
    ],
)
def test_values_count_and_not_who_wrote_them(settings: dict[str, Any], expected: list[str]):
    assert changes(**settings) == expected


def test_what_is_not_known_counts_as_set():
    tree = {"output": "x", "gone": {"a": 1, "b": {}}, "dedup": {"kind": "mine.dedup", "n": 2}}
    with own_modules.refused("samestep report"):
        assert list(changed(Outer, tree)) == [
            *("output", "dedup.kind", "dedup.n", "gone.a", "gone.b")
        ]
