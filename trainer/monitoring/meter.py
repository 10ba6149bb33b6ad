"""Means of metrics over micro-batches and replicas, without waiting for the device in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor


class Meter:
    """Accumulates (sum, weight) pairs on the device; `compute` turns them into means.

    Every replica must add the same names in the same order.

    Args:
        to_device: copies tensors from the host to the device.
        before: totals over all replicas to start from, see `totals`.
        is_exact: totals have the same bits in any grouping of the additions.
    """

    def __init__(
        self,
        to_device: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
        before: Mapping[str, Sequence[float]] = MappingProxyType({}),
        is_exact: bool = False,
    ) -> None:
        self._is_exact = is_exact
        self._to_device = to_device
        self._totals: dict[str, Tensor] = {}
        self._before = dict(before)

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds scalars (sum, weight) by name; only queues work on the device."""
        for name, pair in metrics.items():
            addend = torch.stack(pair).detach().double()
            if self._is_exact:
                from trainer.partition import exact

                addend = exact.split_metric(addend)  # [2 words, 2]
            # Zeros come from the host, so that XLA compiles one graph for the first and all further
            # additions.
            if name not in self._totals:
                zeros = torch.zeros(addend.shape, dtype=torch.float64)
                self._totals |= self._to_device({name: zeros})
            self._totals[name] = self._totals[name] + addend

    def totals(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, tuple[float, float]]:
        """Returns (sum, weight) by name over all replicas: one all-reduce, one copy to the host.

        Args:
            all_reduce: sums a tensor over the replicas and returns the result.
        """
        # One tensor [names, 2] for all metrics: a collective for each would wait for each.
        found = {name: (total, weight) for name, (total, weight) in self._before.items()}
        if self._totals:
            stacked = all_reduce(torch.stack(list(self._totals.values())))
            if self._is_exact:
                from trainer.partition import exact

                stacked = exact.total(stacked.unbind(1))
            for name, (total, weight) in zip(self._totals, stacked.tolist(), strict=True):
                before_total, before_weight = found.get(name, (0.0, 0.0))
                found[name] = (before_total + total, before_weight + weight)
        return found

    def compute(self, all_reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns the weighted means over all replicas, and resets. Skips means of weight 0."""
        totals = self.totals(all_reduce)
        self._totals, self._before = {}, {}
        # Weight 0: no micro-batch had a prediction of this kind, so there is no mean.
        return {name: total / weight for name, (total, weight) in totals.items() if weight}
