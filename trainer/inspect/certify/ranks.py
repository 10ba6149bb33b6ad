"""What ranks tell each other about their checks."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of the check.

    Attributes:
        rank: of this process.
        nodes: name of the machine of each rank.
        group: of the host, as the devices' collectives may be what is wrong.
    """

    rank: int
    nodes: tuple[str, ...]
    group: dist.ProcessGroup

    @classmethod
    def meet(cls, rank: int, size: int, group: dist.ProcessGroup) -> Ranks:
        """Learns the machines of all ranks. Collective."""
        nodes: list[str] = [""] * size
        dist.all_gather_object(nodes, platform.node(), group)
        return cls(rank, tuple(nodes), group)

    def gather(self, item: T) -> list[T]:
        """Every rank's item, on every rank. Collective."""
        items = [item] * len(self.nodes)
        dist.all_gather_object(items, item, self.group)
        return items

    def named(self, ranks: Sequence[int]) -> str:
        """The ranks with their machines, as "rank 3 (node-1)"."""
        return " and ".join(f"rank {rank} ({self.nodes[rank]})" for rank in ranks)

    def odd_ones_out(self, found: Sequence[Mapping[str, str]]) -> tuple[str, list[int]] | None:
        """The first name whose value is not the same on all ranks, and the ranks to blame.

        These are the ranks that differ from the majority; all, if there is none.

        Args:
            found: by rank; the names of all ranks are the same, and in the same order.
        """
        for name in found[0]:
            values = [each[name] for each in found]
            value, count = Counter(values).most_common(1)[0]
            if count < len(values):
                is_majority = 2 * count > len(values)
                odd = [rank for rank, each in enumerate(values) if each != value]
                return name, odd if is_majority else list(range(len(values)))
        return None
