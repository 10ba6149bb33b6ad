"""Exact sums of gradients over the units of a step, whichever rank computes which unit.

A unit is a micro-batch whose examples depend on the configuration only. Its gradient is split into
words (`trainer.partition.exact`), which are added up on this rank, then over ranks, and become a
float once:

    GradientSums             of whole parameters: single, DDP, and FSDP2 with one partition
    ShardingUnitReduction    FSDP2's reduce-scatter of one sharding unit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.partition import exact, local_parts

_MOST_ELEMENTS = 2**22  # of a collective: 32 MiB


class GradientSums:
    """Sums of the gradients of parameters that each rank of a group holds alike.

    Args:
        group: the ranks that compute other units; None: no others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # Memory is kept for the next step.
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._added: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def unit(self, parameters: Iterable[nn.Parameter], last: bool) -> Iterator[None]:
        """Surrounds the passes of a unit, and takes its gradients from the parameters.

        After the last unit of a step, each parameter's gradient is the sum over all units.
        """
        try:
            yield
            self._add(parameters)
            if last:
                self._finish()
        except BaseException:
            self._added.clear()  # the step may be taken again
            raise

    @torch.no_grad()
    def _add(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            (gradient,) = local_parts([parameter.grad])
            if parameter not in self._sums:
                self._sums[parameter] = gradient.new_zeros(2, *gradient.shape, dtype=torch.float64)
            elif parameter not in self._added:
                self._sums[parameter].zero_()
            self._added[parameter] = self._sums[parameter]
            exact.add_gradient(self._added[parameter], gradient)
            parameter.grad = None

    @torch.no_grad()
    def _finish(self) -> None:
        added, self._added = self._added, {}
        for parameter, words in added.items():
            if self._group is not None:
                for bucket in torch.split(words.view(-1), _MOST_ELEMENTS):
                    dist.all_reduce(bucket, group=self._group)
            parameter.grad = torch.empty_like(parameter)
            (gradient,) = local_parts([parameter.grad])
            gradient.copy_(exact.total(words))


class ShardingUnitReduction:
    """Replaces FSDP2's reduce-scatter of a sharding unit, after each micro-batch.

    It has the methods of FSDP2's `ReduceScatter`. FSDP2 adds up what it returns: zeros, and the
    whole sum after the last micro-batch.

    Args:
        replicas: ranks that hold the same partition (HSDP); None: no others.
        each: whether words are scattered after each micro-batch; else once a step, which sends
            less and holds the words of the whole unit.

    Attributes:
        last: whether the current micro-batch is the last of its step.
    """

    def __init__(self, replicas: dist.ProcessGroup | None, each: bool) -> None:
        self._replicas, self._each = replicas, each
        self._sums: Tensor | None = None
        self.last = True

    def forget(self) -> None:
        """Drops the sums of a step that has failed."""
        self._sums = None

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        # FSDP2 divides neither before nor after a mean, so the sum of its gradients is the loss's.
        assert op == dist.ReduceOp.AVG, f"FSDP2 reduces gradients by {op}"
        # A rank's part is [2, numel], so the words of all parts are [ranks, 2, numel].
        ranks, numel = group.size(), output_tensor.numel()
        words = None if self._each else self._sums
        if words is None:
            words = input_tensor.new_zeros(ranks, 2, numel, dtype=torch.float64)
        for own, part in zip(words, input_tensor.view(ranks, numel), strict=True):
            exact.add_gradient(own, part)
        if self._each:
            words = self._scatter(words, group)
            words = words if self._sums is None else self._sums.add_(words)
        self._sums = words
        if not self.last:
            output_tensor.zero_()
            return
        sums = words if self._each else self._scatter(words, group)
        self._sums = None
        if self._replicas is not None:
            dist.all_reduce(sums, group=self._replicas)
        output_tensor.copy_(exact.total(sums))

    def _scatter(self, words: Tensor, group: dist.ProcessGroup) -> Tensor:
        mine = torch.empty_like(words[0])  # [2, numel]
        dist.reduce_scatter_tensor(mine.view(-1), words.view(-1), group=group)
        return mine
