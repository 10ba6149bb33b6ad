"""What optimizers share whose update depends on norms of whole tensors, as LAMB's and Adafactor's do."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from trainer.partition import block_bounds, local_parts, whole_shape

MIN_RMS = 1e-3  # tensors of zeros must be able to grow: the epsilon_2 of Adafactor's paper, in nanoT5's code, too


class Blockwise(Optimizer):
    """An optimizer of blocks: the tensors of the published algorithms.

    A block is a parameter, or one of several tensors of equal size that are stacked in a parameter's rows. A process
    may hold all of it, a part, or nothing.

    Updates are counted on the host, in each group's "updates", so that no step waits for the device.

    Args:
        groups: as `parameter_groups` makes them.
        blocks: how many blocks a parameter has, where there are several.
        settings: the defaults of the groups.

    Attributes:
        grad_scale, found_inf: set by loss scaling before each step, as for torch's fused optimizers: what gradients
            are to be divided by, and 1 if some are not finite, so that nothing may change.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], blocks: Mapping[Tensor, int], **settings: Any) -> None:
        super().__init__([{**group, "updates": 0} for group in groups], settings)
        weights = [weight for group in groups for weight in group["params"]]
        self._bounds = {weight: block_bounds(weight, blocks.get(weight, 1)) for weight in weights}
        self._block_sizes = {weight: self._equal_sizes(weight) for weight in weights}

    def _equal_sizes(self, weight: Tensor) -> Tensor:
        blocks = len(self._bounds[weight]) - 1
        return torch.full((blocks,), math.prod(whole_shape(weight)) / blocks, dtype=torch.float64, device=weight.device)

    def _members(self) -> Iterator[tuple[dict[str, Any], list[Tensor], slice]]:
        """Each group with its weights that have a gradient, and which of the blocks of all groups' are theirs."""
        start = 0
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            stop = start + sum(len(self._bounds[weight]) - 1 for weight in weights)
            yield group, weights, slice(start, stop)
            start = stop

    def _blocks(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """What lies here of each block, out of local parts that lie as those of the weights."""
        bounds = [self._bounds[weight] for weight in weights]
        return [part[i:j] for part, ends in zip(parts, bounds, strict=True) for i, j in pairwise(ends)]

    def _sizes(self, weights: list[Tensor]) -> Tensor:
        """The number of elements of each block, whole: [blocks], fp64."""
        return torch.cat([self._block_sizes[weight] for weight in weights])

    def _kept(self, like: Tensor) -> Tensor:
        """What the update is multiplied by, fp64: 0 where loss scaling has found that gradients overflowed, else 1."""
        if self.found_inf is None:
            return torch.ones((), dtype=torch.float64, device=like.device)
        return 1 - self.found_inf.double()

    def _shrink(self, tensors: list[Tensor], share: float) -> None:
        """Takes a share of the tensors away, unless gradients overflowed."""
        torch._foreach_mul_(tensors, (1 - share * self._kept(tensors[0])).to(tensors[0].dtype))


class BlockwiseAdam(Blockwise):
    """Adam with a factor for each block: x - lr * scale * u, with u = m / (sqrt(v) + eps)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        members = list(self._members())
        weights = [weight for _, some, _ in members for weight in some]
        for group in self.param_groups:
            group["updates"] += 1
        updates = [update for group, some, _ in members for update in self._adam(group, some)]
        blocks, changes = self._blocks(weights, local_parts(weights)), self._blocks(weights, updates)
        scales = self._scales(weights, blocks, changes)
        for group, _, part in members:
            torch._foreach_addcmul_(blocks[part], changes[part], scales[part], value=-group["lr"])

    @abstractmethod
    def _scales(self, weights: list[Tensor], blocks: list[Tensor], changes: list[Tensor]) -> list[Tensor]:
        """The factor of each block: scalars on the device, of the weights' type.

        Args:
            weights: those that are updated.
            blocks: their blocks, as much of them as this process holds.
            changes: the u of each block, likewise.
        """

    def _adam(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Brings the running means up to date; returns the u of each weight, as much of it as this process holds.

        Torch's fused kernel, started from zeros with a learning rate of -1, leaves m / (sqrt(v) + eps) behind.
        """
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        updates = [torch.zeros_like(part) for part in local_parts(weights)]
        # The kernel adds 1 itself, and its correction, 1 - beta ** step, is exactly 1 after infinitely many steps.
        step = group["updates"] - 1.0 if group["bias_correction"] else math.inf
        adam(
            updates,
            local_parts(weight.grad for weight in weights if weight.grad is not None),
            local_parts(self.state[weight]["exp_avg"] for weight in weights),
            local_parts(self.state[weight]["exp_avg_sq"] for weight in weights),
            max_exp_avg_sqs=[],
            state_steps=list(torch.full((len(weights),), step, device=weights[0].device).unbind()),
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return updates
