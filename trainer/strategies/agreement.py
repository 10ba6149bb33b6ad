"""Facts that all machines of a run must share, compared by name.

Each fact has a name and a short text, such as "seed" and "7"; None is unknown, and not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Facts: TypeAlias = Mapping[str, str | None]

_MOST_NAMED = 5


@dataclass(frozen=True)
class Machine:
    """A machine, or one process of it.

    Attributes:
        name: for messages.
        facts: of its settings, data and versions, by name.
        has_run: whether it has already trained in this run.
    """

    name: str
    facts: Facts
    has_run: bool = False


def disagreement(first: Machine, second: Machine) -> str:
    """Names the facts that differ between two machines; empty if none does."""
    different = []
    for name in {**first.facts, **second.facts}:
        one, other = (machine.facts.get(name, "not set") for machine in (first, second))
        if one != other and None not in (one, other):
            different.append(f"{name}: {one} on {first.name}, {other} on {second.name}")
    if not different:
        return ""
    listed = "; ".join(different[:_MOST_NAMED])
    if len(different) > _MOST_NAMED:
        listed += f"; and {len(different) - _MOST_NAMED} more"
    return (
        f"the machines of this run differ ({listed}). Start all of them with the same settings, "
        "data and versions."
    )
