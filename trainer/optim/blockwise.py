"""Optimizers that scale the update of each tensor by a norm of the whole tensor.

LAMB, Adafactor and scaled AdamW compute one number for each tensor of the published algorithm and
multiply the tensor's update by it. Two things stand between that and the parameters of a model:

- A parameter may hold several such tensors, called blocks here: fused QKV is three matrices
  stacked in the rows of one. Each block has a norm of its own.
- A process may hold only a part of a parameter (FSDP, ZeRO). It sums the squares of its part of
  each block; `trainer.partition.add_up` adds these sums over the processes, in one collective.

Example: a fused QKV weight [9, 5] has 3 blocks of 3 rows. FSDP gives rank 0 the rows 0-4 and rank 1
the rows 5-8. `block_bounds` then says where each block begins in the local rows:

    rank 0   [0, 3, 5, 5]   rows 0:3 are all of Q, rows 3:5 begin K, rows 5:5 are none of V
    rank 1   [0, 0, 1, 4]   rows 0:0 are none of Q, row 0:1 ends K, rows 1:4 are all of V

so both ranks have three local tensors, in the same order, whose squared sums add up to the squared
norms of Q, K and V.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from trainer.accelerators import kernels
from trainer.optim.groups import Group
from trainer.partition import StackedParameter, block_bounds, local_parts, whole_shape

MIN_RMS = 1e-3
"""Least RMS(x) by which updates are scaled, so that tensors of zeros can grow.

It is epsilon_2 of Adafactor's paper; nanoT5's code has it too.
"""


class Blockwise(Optimizer):
    """An optimizer of blocks, the tensors of the published algorithm.

    The blocks of a `StackedParameter`, which every process holds whole, stay together in one
    tensor; slicing it would make a compiled graph move data between devices. So the lists of
    `_blocks` have one entry for each block, except that a stack is one entry for all of its blocks.
    Vectors marked [blocks] have one number for each block, in the same order.

    Each group counts its updates in "updates", on the host, so that no step waits for the device.
    For a group that is frozen at first, the count is 0 or less until its first update.

    Args:
        groups: from `parameter_groups`.
        blocks: number of blocks by parameter; parameters that are not in it have one.
        settings: the defaults of the groups.
        exact: whether updates have the same bits under any partition.

    Attributes:
        grad_scale, found_inf: set by loss scaling before each step, as for torch's fused
            optimizers: the divisor of the gradients, and 1 if some are not finite, in which case
            nothing may change.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[Group],
        blocks: Mapping[Tensor, int],
        settings: Mapping[str, object],
        exact: bool = False,
    ) -> None:
        self.exact = exact
        counted = [{**group, "updates": -group["begins"]} for group in groups]
        super().__init__(counted, dict(settings))
        self._counts: dict[Tensor, list[int]] = {}  # number of blocks in each entry of `_blocks`
        self._lengths: dict[Tensor, list[int]] = {}  # number of local rows of each block
        self._block_sizes: dict[Tensor, Tensor] = {}
        for group in groups:
            for weight in group["params"]:
                count = blocks.get(weight, 1)
                if isinstance(weight, StackedParameter):
                    count *= len(weight)
                    self._counts[weight] = [count]
                else:
                    self._counts[weight] = [1] * count
                    bounds = block_bounds(weight, count)
                    self._lengths[weight] = [j - i for i, j in pairwise(bounds)]
                # On the device now, so that no step has to copy it there.
                self._block_sizes[weight] = torch.full(
                    (count,),
                    math.prod(whole_shape(weight)) / count,
                    dtype=torch.float64,
                    device=weight.device,
                )

    def _begin_update(self) -> tuple[list[tuple[Group, list[Tensor], slice]], list[Tensor]]:
        """Counts an update; returns the `_members`, and all weights that have a gradient."""
        members = list(self._members())
        for group in self.param_groups:
            group["updates"] += 1
        return members, [weight for _, own, _ in members for weight in own]

    def _members(self) -> Iterator[tuple[Group, list[Tensor], slice]]:
        """Each group with its weights that have a gradient, and their entries of `_blocks`.

        A group without any, as a frozen one, is left out.
        """
        start = 0
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            stop = start + len(self._counts_of(weights))
            yield group, weights, slice(start, stop)
            start = stop

    def _blocks(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Cuts local parts, partitioned like the weights, into blocks: views of them."""
        blocks: list[Tensor] = []
        for weight, part in zip(weights, parts, strict=True):
            if not isinstance(weight, StackedParameter):
                blocks += self._split(weight, part)
            elif part.ndim == 2:  # biases: [layers, n] becomes [blocks, n / blocks of a layer]
                blocks.append(part.view(*self._counts[weight], -1))
            else:
                blocks.append(part)
        return blocks

    def _split(self, weight: Tensor, part: Tensor) -> Iterable[Tensor]:
        # A view costs the host as much as a kernel's launch, so whole tensors get none.
        lengths = self._lengths[weight]
        return (part,) if len(lengths) == 1 else torch.split(part, lengths)

    def _counts_of(self, weights: list[Tensor]) -> list[int]:
        """Number of blocks in each entry of `_blocks`."""
        return [count for weight in weights for count in self._counts[weight]]

    def _factors(self, values: Tensor, weights: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
        """Turns values [blocks] into tensors that broadcast over the entries of `_blocks`."""
        # A stack [layers, rows, columns] gets its values as [layers, rows, 1]: with 2 layers of 4
        # rows and 2 blocks each, the values a, b, c, d become a a b b for the rows of the first
        # layer and c c d d for the second.
        values = values.to(blocks[0].dtype)
        if len(values) == len(blocks):  # no stacks
            return list(values.unbind())
        factors = []
        parts = torch.split(values, self._counts_of(weights))
        for part, block in zip(parts, blocks, strict=True):
            if len(part) == 1:
                factors.append(part.view(()))
                continue
            # Reshaping the block instead would make devices that hold some rows each gather all.
            rows = block.shape[:-1]
            repeated = part.unsqueeze(1).expand(-1, math.prod(rows) // len(part))
            factors.append(repeated.reshape(*rows, 1))
        return factors

    def _sizes(self, weights: list[Tensor]) -> Tensor:
        """Number of elements of each whole block: [blocks], fp64."""
        return torch.cat([self._block_sizes[weight] for weight in weights])

    def _finite(self, like: Tensor) -> Tensor:
        """1, or 0 where loss scaling has found that gradients overflowed; fp64."""
        # Multiplying by it skips an update without the host waiting for the answer.
        if self.found_inf is None:
            return torch.ones((), dtype=torch.float64, device=like.device)
        return 1 - self.found_inf.double()

    def _shrink(self, tensors: list[Tensor], fraction: float) -> None:
        """Multiplies tensors by 1 - fraction, unless gradients overflowed."""
        finite = self._finite(tensors[0])
        torch._foreach_mul_(tensors, (1 - number(fraction, finite) * finite).to(tensors[0].dtype))


class AdamMoments(Blockwise):
    """Adam's running means, and the update u = m / (sqrt(v) + eps) from them.

    Attributes:
        decay_in_update: whether decay * x is added to u, as in AdamW and LAMB.
    """

    decay_in_update = True

    def _adam(self, group: Group, weights: list[Tensor]) -> list[Tensor]:
        """Updates the running means; returns the local part of each weight's u."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        gradients = local_parts(weight.grad for weight in weights if weight.grad is not None)
        means = local_parts(self.state[weight]["exp_avg"] for weight in weights)
        squares = local_parts(self.state[weight]["exp_avg_sq"] for weight in weights)
        # On CPUs, the fused kernel rounds the last elements of a part differently.
        fused = kernels.is_eager(weights[0].device) and not self.exact
        compute = self._fused_adam if fused else self._traced_adam
        updates = compute(group, gradients, means, squares)
        if self.decay_in_update:
            torch._foreach_add_(updates, local_parts(weights), alpha=group["weight_decay"])
        return updates

    def _fused_adam(
        self,
        group: Group,
        gradients: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
    ) -> list[Tensor]:
        """Computes u with torch's fused kernel."""
        # The kernel only updates weights, as w -= lr * u. From zeros, with a learning rate of -1,
        # it leaves u itself behind.
        updates = [torch.empty_like(gradient) for gradient in gradients]
        torch._foreach_zero_(updates)
        # The kernel adds 1 to the step. Its correction 1 - beta ** step is 1 for infinitely many.
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
        self,
        group: Group,
        gradients: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
    ) -> list[Tensor]:
        """Computes u with plain operations, for devices without a fused kernel."""
        # Numbers that change from step to step are tensors: constants would recompile the graph.
        beta1, beta2 = group["betas"]
        t = group["updates"] if group["bias_correction"] else math.inf
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, number(math.sqrt(1 - beta2**t), roots[0]))
        torch._foreach_add_(roots, [number(group["eps"], roots[0])] * len(roots))
        updates = torch._foreach_div(means, number(1 - beta1**t, roots[0]))
        torch._foreach_div_(updates, roots)
        return list(updates)


class BlockwiseAdam(AdamMoments):
    """Adam with a scale for each block: x - lr * scale * u, with u = m / (sqrt(v) + eps)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        members, weights = self._begin_update()
        parts = [update for group, own, _ in members for update in self._adam(group, own)]
        blocks, updates = self._blocks(weights, local_parts(weights)), self._blocks(weights, parts)
        scales = self._scales(weights, blocks, updates)
        for group, _, entries in members:
            factors = torch._foreach_mul(scales[entries], number(-group["lr"], blocks[0]))
            torch._foreach_addcmul_(blocks[entries], updates[entries], factors)

    @abstractmethod
    def _scales(
        self,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
    ) -> list[Tensor]:
        """The scale of each block's update: from `_factors`, or scalars on the device.

        Args:
            weights: the parameters to update.
            blocks: the local parts of their blocks, from `_blocks`.
            updates: u of each block, likewise.
        """


def number(value: float, like: Tensor) -> Tensor:
    """A number that changes from step to step, as a scalar on the device of `like`.

    Compiled graphs take it as data, not as a constant.
    """
    if kernels.is_eager(like.device):
        return torch.full((), value, dtype=like.dtype, device=like.device)
    # torch-xla inspects tensors without dimensions, and makes constants of 0 and 1.
    return torch.tensor([value], dtype=like.dtype).to(like.device, non_blocking=True).view(())
