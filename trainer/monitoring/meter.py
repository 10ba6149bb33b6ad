"""Means of metrics over many micro-batches and replicas, without waiting for the device in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Meter:
    """Adds up (sum, weight) pairs on the device until `compute` turns them into means.

    Every replica must add the same names in the same order.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds scalars (sum, weight) by name; only enqueues work on the device."""
        for name, pair in metrics.items():
            addend = torch.stack(pair).detach().double()
            total = self._totals.get(name)
            # A total restored from a checkpoint is in host memory until the first addend arrives.
            self._totals[name] = addend if total is None else total.to(addend.device) + addend

    def totals(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, tuple[float, float]]:
        """Returns (sum, weight) by name over all replicas: one all-reduce, one copy to the host.

        Args:
            all_reduce: sums a tensor over the replicas and returns the result.
        """
        if not self._totals:
            return {}
        stacked = all_reduce(torch.stack(list(self._totals.values())))
        return {name: (total, weight) for name, (total, weight) in zip(self._totals, stacked.tolist(), strict=True)}

    def compute(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns the weighted means over all replicas, without those of weight 0, and starts anew."""
        totals = self.totals(all_reduce)
        self._totals = {}
        return {name: total / weight for name, (total, weight) in totals.items() if weight}
