"""What optimizers share whose update depends on norms of whole tensors, as LAMB's and Adafactor's do."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from trainer.accelerators import kernels
from trainer.optim.groups import Group
from trainer.partition import StackedParameter, block_bounds, local_parts, whole_shape

MIN_RMS = 1e-3  # tensors of zeros must be able to grow: the epsilon_2 of Adafactor's paper, in nanoT5's code, too


class Blockwise(Optimizer):
    """An optimizer of blocks: the tensors of the published algorithms.

    A block is a parameter, or one of several tensors of equal size that are stacked in a parameter's rows. A process
    may hold all of it, a part, or nothing. Those of stacked parameters, which are whole, stay together in one tensor.

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

    def __init__(
        self, groups: list[Group], blocks: Mapping[Tensor, int], **settings: object
    ) -> None:
        super().__init__([{**group, "updates": 0} for group in groups], settings)
        weights = [weight for group in groups for weight in group["params"]]
        self._counts = {weight: _counts(weight, blocks.get(weight, 1)) for weight in weights}
        apart = [weight for weight in weights if not isinstance(weight, StackedParameter)]
        self._bounds = {weight: block_bounds(weight, blocks.get(weight, 1)) for weight in apart}
        self._block_sizes = {weight: self._equal_sizes(weight) for weight in weights}

    def _equal_sizes(self, weight: Tensor) -> Tensor:
        count = sum(self._counts[weight])
        size = math.prod(whole_shape(weight)) / count
        return torch.full((count,), size, dtype=torch.float64, device=weight.device)

    def _members(self) -> Iterator[tuple[Group, list[Tensor], slice]]:
        """Each group with its weights that have a gradient, and which of the tensors of `_blocks` are theirs."""
        start = 0
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            stop = start + len(self._counts_of(weights))
            yield group, weights, slice(start, stop)
            start = stop

    def _blocks(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """What lies here of each block, out of local parts that lie as those of the weights; or stacks of blocks."""
        blocks = []
        for weight, part in zip(weights, parts, strict=True):
            counts = self._counts[weight]
            if isinstance(weight, StackedParameter):
                blocks.append(part.view(*counts, -1) if part.ndim == 2 else part)
            else:
                blocks += [part[i:j] for i, j in pairwise(self._bounds[weight])]
        return blocks

    def _counts_of(self, weights: list[Tensor]) -> list[int]:
        """How many blocks each of the tensors of `_blocks` holds."""
        return [count for weight in weights for count in self._counts[weight]]

    def _factors(self, values: Tensor, weights: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
        """A value of each block, [blocks], as what each of the tensors of `_blocks` can be multiplied by."""
        parts = torch.split(values.to(blocks[0].dtype), self._counts_of(weights))
        return [
            part.view(()) if len(part) == 1 else of_rows(part, block.shape[:-1])
            for part, block in zip(parts, blocks, strict=True)
        ]

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
        kept = self._kept(tensors[0])
        torch._foreach_mul_(tensors, (1 - number(share, kept) * kept).to(tensors[0].dtype))


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
        blocks, changes = (
            self._blocks(weights, local_parts(weights)),
            self._blocks(weights, updates),
        )
        scales = self._scales(weights, blocks, changes)
        for group, _, part in members:
            factors = torch._foreach_mul(scales[part], number(-group["lr"], blocks[0]))
            torch._foreach_addcmul_(blocks[part], changes[part], factors)

    @abstractmethod
    def _scales(
        self, weights: list[Tensor], blocks: list[Tensor], changes: list[Tensor]
    ) -> list[Tensor]:
        """What the update of each block is multiplied by: as of `_factors`, or scalars on the device.

        Args:
            weights: those that are updated.
            blocks: their blocks, as much of them as this process holds, as of `_blocks`.
            changes: the u of each block, likewise.
        """

    def _adam(self, group: Group, weights: list[Tensor]) -> list[Tensor]:
        """Brings the running means up to date; returns the u of each weight, as much of it as this process holds."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        gradients = local_parts(weight.grad for weight in weights if weight.grad is not None)
        means, squares = (
            local_parts(self.state[weight][name] for weight in weights)
            for name in ("exp_avg", "exp_avg_sq")
        )
        fused = kernels.has_fused_optimizers(weights[0].device)
        compute = self._fused_adam if fused else self._traced_adam
        return compute(group, gradients, means, squares)

    def _fused_adam(
        self, group: Group, gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]
    ) -> list[Tensor]:
        """By torch's fused kernel: from zeros, with a learning rate of -1, it leaves m / (sqrt(v) + eps) behind."""
        updates = [torch.zeros_like(gradient) for gradient in gradients]
        # The kernel adds 1 itself, and its correction, 1 - beta ** step, is exactly 1 after infinitely many steps.
        step = group["updates"] - 1.0 if group["bias_correction"] else math.inf
        adam(
            updates,
            gradients,
            means,
            squares,
            max_exp_avg_sqs=[],
            state_steps=list(torch.full((len(updates),), step, device=updates[0].device).unbind()),
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

    def _traced_adam(
        self, group: Group, gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]
    ) -> list[Tensor]:
        """By plain operations, for devices without such a kernel: numbers that change from step to step are tensors."""
        (beta1, beta2), t = (
            group["betas"],
            group["updates"] if group["bias_correction"] else math.inf,
        )
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, number(math.sqrt(1 - beta2**t), roots[0]))
        torch._foreach_add_(roots, [number(group["eps"], roots[0])] * len(roots))
        updates = torch._foreach_div(means, number(1 - beta1**t, roots[0]))
        torch._foreach_div_(updates, roots)
        return list(updates)


def of_rows(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Values of blocks as values of their rows: [blocks] -> [*shape, 1], where `shape` has equally many rows of each.

    Reshaping a whole tensor instead would have devices that hold some rows each gather all of them.
    """
    return values.unsqueeze(1).expand(-1, math.prod(shape) // len(values)).reshape(*shape, 1)


def _counts(weight: Tensor, blocks: int) -> list[int]:
    """How many blocks lie in each of the tensors that a weight is cut into: all of them in one if it is a stack."""
    return [blocks * len(weight)] if isinstance(weight, StackedParameter) else [1] * blocks


class DecayedAdam(BlockwiseAdam):
    """Adam whose u has the decay of the weights in it: m / (sqrt(v) + eps) + decay * x."""

    def _adam(self, group: Group, weights: list[Tensor]) -> list[Tensor]:
        updates = super()._adam(group, weights)
        torch._foreach_add_(updates, local_parts(weights), alpha=group["weight_decay"])
        return updates


def number(value: float, like: Tensor) -> Tensor:
    """A number that changes from step to step, as a scalar where `like` is: data, where graphs are compiled."""
    if kernels.has_fused_optimizers(like.device):
        return torch.full((), value, dtype=like.dtype, device=like.device)
    # Of a tensor without dimensions, torch-xla would look at the value: 0 and 1 are constants to it.
    return torch.tensor([value], dtype=like.dtype).to(like.device, non_blocking=True).view(())
