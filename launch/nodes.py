"""How many nodes a job may have: a number, or a range."""

from __future__ import annotations

import re

from trainer.errors import ConfigError


def node_range(nodes: str | int) -> tuple[int, int]:
    """The fewest nodes, and the most, of what is written as 4 or 2-8.

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(nodes))
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise ConfigError(
            f"nodes must be a number of nodes such as 4, or a range such as 2-8, not {nodes}"
        )
    return fewest, most


def device_counts(nodes: tuple[int, int], per_node: int) -> tuple[int, ...]:
    """The devices of each number of nodes in a range."""
    return tuple(number * per_node for number in range(nodes[0], nodes[1] + 1))
