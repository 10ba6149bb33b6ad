"""Exchange of findings between the ranks of a check."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from samestep.findings import Finding
from trainer.checkpoint import collective
from trainer.training.observers.state_check import odd_ones_out

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of the check.

    Attributes:
        rank: of this process.
        nodes: name of the machine of each rank.
        group: of the host, as the devices' collectives may be wrong.
    """

    rank: int
    nodes: tuple[str, ...]
    group: dist.ProcessGroup

    @classmethod
    def meet(cls, rank: int, size: int, group: dist.ProcessGroup) -> Ranks:
        """Learns the machines of all ranks. Collective."""
        return cls(rank, tuple(collective.gather(platform.node(), size, group)), group)

    def gather(self, item: T) -> list[T]:
        """Every rank's item, on every rank. Collective."""
        return collective.gather(item, len(self.nodes), self.group)

    def named(self, ranks: Sequence[int]) -> str:
        """The ranks with their machines, as "rank 3 (node-1)"."""
        return " and ".join(f"rank {rank} ({self.nodes[rank]})" for rank in ranks)

    def verdict(self, subject: str, wrong: str, found: str, fix: str) -> Finding:
        """The finding of a check that each rank has made alone. Collective.

        Args:
            wrong: this rank's problem; empty if there is none.
            found: the observation if no rank has found anything wrong.
            fix: advice otherwise.
        """
        every = self.gather(wrong)
        failed = [rank for rank, text in enumerate(every) if text]
        if not failed:
            return Finding(subject, "ok", found)
        more = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        text = f"{self.named(failed[:1])}: {every[failed[0]]}{more}"
        return Finding(subject, "failed", text, fix)


def first_odd(found: Sequence[Mapping[str, str]]) -> tuple[str, list[int]] | None:
    """The first name with different values on some ranks, and the ranks to blame.

    Args:
        found: by rank; the names of all ranks are the same, and in the same order.
    """
    for name in found[0]:
        if odd := odd_ones_out([each[name] for each in found]):
            return name, odd
    return None
