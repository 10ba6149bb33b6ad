"""Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): of a matrix's second moments it keeps row and column means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optim import Structure
from trainer.optim.blockwise import MIN_RMS, Blockwise, number
from trainer.optim.groups import Group, parameter_groups
from trainer.partition import (
    StackedParameter,
    add_up,
    flat_start,
    layer_shape,
    local_parts,
    rectangles,
    squared_norms,
    whole_shape,
)

Place: TypeAlias = tuple[slice, slice]


@dataclass(frozen=True)
class Config:
    """Adafactor, as T5 was trained with it: memory for a row and a column where Adam keeps two matrices.

    Attributes:
        lr: learning rate at the top of the schedule, relative to the root mean square of a tensor's weights if
            `scale_by_rms` is true. The paper's "relative step" is lr 0.01 with schedule
            {decay: inverse_sqrt, decay_start: 10000}.
        scale_by_rms: multiplies the update of each tensor by the root mean square of its weights, at least 0.001.
        clip_threshold: upper bound of the root mean square of a tensor's update, before it is scaled.
        decay_rate: update t gives the squared gradient a weight of t^-decay_rate in the second moments.
        beta1: decay rate of the running mean of updates; 0 keeps none, which saves its memory.
        eps: added to squared gradients.
        weight_decay: decoupled; each update takes lr * weight_decay of a matrix's weight away.
        min_dim_size_to_factor: matrices with fewer rows or columns keep all of their second moments.
    """

    lr: float = 1e-2
    scale_by_rms: bool = True
    clip_threshold: float = 1.0
    decay_rate: float = 0.8
    beta1: float = 0.0
    eps: float = 1e-30
    weight_decay: float = 0.0
    min_dim_size_to_factor: int = 128

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value}; use a number of 0 or more")
        for name in ("clip_threshold", "decay_rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} is {value}; use a number above 0")
        if not 0 <= self.beta1 < 1:
            raise ConfigError(
                f"beta1 is {self.beta1}; use a number from 0, for none, up to below 1"
            )
        if not 1e-37 <= self.eps < math.inf:  # the least that fp32 holds in full precision
            raise ConfigError(f"eps is {self.eps}; use a number of 1e-37 or more, as 1e-30")
        if self.min_dim_size_to_factor < 0:
            raise ConfigError(
                f"min_dim_size_to_factor is {self.min_dim_size_to_factor}; use 0 or more"
            )

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on."""
        named = list(parameters)
        return Adafactor(
            parameter_groups(named, self.weight_decay),
            {
                parameter: structure.stacked[name]
                for name, parameter in named
                if name in structure.stacked
            },
            self,
        )


class Adafactor(Blockwise):
    r"""Adafactor, algorithms 4 and 5 of the paper. A tensor x of weights with gradient g becomes

        x - lr * max(0.001, RMS(x)) * u / max(1, RMS(u) / clip_threshold)    with    u = g / sqrt(v)

    where v is the running mean of g^2 + eps, at update t with a decay rate of 1 - t^-decay_rate. Of a matrix only the
    means r over rows and c over columns are kept, which every process has the whole of, and v_ij = r_i c_j / mean(c).
    (The paper divides by mean(r), which is the same number.)

    A step takes two collectives, for all tensors together: one of these means and RMS(x), one of RMS(u). The update is
    computed in the memory of the gradients, which are lost.
    """

    def __init__(self, groups: list[Group], blocks: Mapping[Tensor, int], config: Config) -> None:
        super().__init__(groups, blocks, lr=config.lr)
        self._config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        members = list(self._members())
        weights = [weight for _, some, _ in members for weight in some]
        for weight in weights:
            if not self.state[weight]:
                self._create_state(weight)
        for group in self.param_groups:
            group["updates"] += 1
        blocks, gradients = self._blocks(weights, local_parts(weights)), self._gradients(weights)
        counts = self._counts_of(weights)
        weight_squares = self._update_moments(weights, gradients, squared_norms(blocks, counts))
        self._precondition(weights, gradients)
        changes = self._blocks(weights, gradients)
        sizes = self._sizes(weights)
        update_rms = (add_up(squared_norms(changes, counts), weights[0]) / sizes).sqrt()
        scales = 1 / (update_rms / self._config.clip_threshold).clamp(min=1)
        if self._config.scale_by_rms:
            scales *= (weight_squares / sizes).sqrt().clamp(min=MIN_RMS)
        factors = self._factors(scales, weights, blocks)
        for group, some, part in members:
            self._apply(group, some, blocks[part], changes[part], factors[part])

    def _create_state(self, weight: Tensor) -> None:
        """Second moments as they are where gradients have been 0 so far."""
        eps, state = self._config.eps, self.state[weight]
        if (
            len(layer_shape(weight)) == 2
            and min(self._stack(weight)[1:]) >= self._config.min_dim_size_to_factor
        ):
            whole = partial(torch.full, fill_value=eps, dtype=weight.dtype, device=weight.device)
            (*stack, rows, columns), (_, height, _) = whole_shape(weight), self._stack(weight)
            state["exp_avg_sq_row"] = whole((*stack, rows))
            state["exp_avg_sq_col"] = whole((*stack, rows // height, columns))
        else:
            state["exp_avg_sq"] = torch.full_like(weight, eps)
        if self._config.beta1 > 0:
            state["exp_avg"] = torch.zeros_like(weight)

    def _gradients(self, weights: list[Tensor]) -> list[Tensor]:
        """Their local parts, without the factor of loss scaling; 0 where that has found any that is not finite."""
        gradients = local_parts(weight.grad for weight in weights if weight.grad is not None)
        if self.grad_scale is not None and self.found_inf is not None:
            torch._foreach_mul_(gradients, 1 / self.grad_scale)
            for gradient in gradients:
                gradient.masked_fill_(self.found_inf.bool(), 0)
        return gradients

    def _update_moments(
        self, weights: list[Tensor], gradients: list[Tensor], squares: Tensor
    ) -> Tensor:
        """Brings the second moments up to date.

        Args:
            weights: those that are updated.
            gradients: their local parts.
            squares: [blocks], a number of each that is added up over the processes in the same collective.

        Returns:
            The sums of `squares`.
        """
        moments: list[Tensor] = []
        means: list[Tensor] = []
        sums: list[Tensor] = [squares]
        factored: list[Tensor] = []
        for weight, gradient in zip(weights, gradients, strict=True):
            state, squared = self.state[weight], gradient.square()
            if "exp_avg_sq" in state:
                moments.append(state["exp_avg_sq"])
                means.append(squared)
            else:
                factored += [state["exp_avg_sq_row"], state["exp_avg_sq_col"]]
                sums += self._factor(weight, squared)
        totals = add_up(torch.cat([each.flatten() for each in sums]), weights[0])
        squares, *whole = torch.split(totals, [each.numel() for each in sums])
        means += [
            mean.to(moment.dtype).view(moment.shape)
            for mean, moment in zip(whole, factored, strict=True)
        ]
        share = self.param_groups[0]["updates"] ** -self._config.decay_rate
        parts = local_parts(moments + factored)
        self._shrink(parts, share)
        torch._foreach_add_(means, self._config.eps)
        torch._foreach_mul_(
            means, (number(share, squares) * self._kept(squares)).to(means[0].dtype)
        )
        torch._foreach_add_(parts, means)
        return squares

    def _factor(self, weight: Tensor, squared: Tensor) -> tuple[Tensor, Tensor]:
        """What this process's part of a matrix adds to the means of the rows and columns of each block."""
        blocks, rows, columns = self._stack(weight)
        if isinstance(weight, StackedParameter):
            inside = [squared.where(each, 0).sum(1) for each in _masks(squared, rows)]
            return squared.sum(2) / columns, torch.stack(inside, 1) / rows
        row_means, column_means = (
            squared.new_zeros(blocks, rows),
            squared.new_zeros(blocks, columns),
        )
        for part, row, column in self._rectangles(weight, squared):
            row_means[row] += part.sum(2) / columns
            column_means[column] += part.sum(1) / rows
        return row_means, column_means

    def _stack(self, weight: Tensor) -> tuple[int, int, int]:
        """A matrix as blocks of rows and columns."""
        blocks, shape = len(self._block_sizes[weight]), whole_shape(weight)
        return blocks, math.prod(shape[:-1]) // blocks, shape[-1]

    def _rectangles(self, weight: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Place, Place]]:
        """The part of a matrix that is here, cut into rectangles [blocks, rows, columns] of its blocks.

        Each comes with its place among all [blocks, rows], and that among [blocks, columns].
        """
        for rectangle, offset in rectangles(part, flat_start(weight), self._stack(weight)):
            block, row, column = (
                slice(i, i + n) for i, n in zip(offset, rectangle.shape, strict=True)
            )
            yield rectangle, (block, row), (block, column)

    def _precondition(self, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Divides the gradients, local parts, by the roots of their second moments, in place."""
        for weight, gradient in zip(weights, gradients, strict=True):
            state = self.state[weight]
            if "exp_avg_sq" in state:
                gradient.mul_(local_parts([state["exp_avg_sq"]])[0].rsqrt())
                continue
            if isinstance(weight, StackedParameter):
                columns = state["exp_avg_sq_col"]
                gradient.mul_(state["exp_avg_sq_row"].rsqrt().unsqueeze(2))
                column_factors = columns.mean(2, keepdim=True).sqrt() * columns.rsqrt()
                for each, factor in zip(
                    _masks(gradient, self._stack(weight)[1]), column_factors.unbind(1), strict=True
                ):
                    gradient.mul_(torch.where(each, factor.unsqueeze(1), 1.0))
                continue
            columns = state["exp_avg_sq_col"]
            row_factors = state["exp_avg_sq_row"].rsqrt().view(len(columns), -1)
            column_factors = columns.mean(1, keepdim=True).sqrt() * columns.rsqrt()
            for part, row, column in self._rectangles(weight, gradient):
                part.mul_(row_factors[row].unsqueeze(2)).mul_(column_factors[column].unsqueeze(1))

    def _apply(
        self,
        group: Group,
        weights: list[Tensor],
        blocks: list[Tensor],
        changes: list[Tensor],
        factors: list[Tensor],
    ) -> None:
        """Changes the blocks of a group's weights by lr * factor * change, or the running mean of that."""
        beta1 = self._config.beta1
        if group["weight_decay"]:
            self._shrink(blocks, group["lr"] * group["weight_decay"])
        factors = list(torch._foreach_mul(factors, number(group["lr"], blocks[0])))
        if beta1 > 0:
            means = self._blocks(
                weights, local_parts(self.state[weight]["exp_avg"] for weight in weights)
            )
            self._shrink(means, 1 - beta1)
            torch._foreach_addcmul_(means, changes, factors, value=1 - beta1)
            changes, factors = means, [self._kept(means[0]).to(means[0].dtype)] * len(means)
        torch._foreach_addcmul_(blocks, changes, factors, value=-1.0)


def _masks(stack: Tensor, height: int) -> list[Tensor]:
    """Which rows of each matrix [R, C] of a stack are of its first block of so many rows, its second and so on: [R, 1].

    (Cutting the stack would have devices that hold some rows each send others.)
    """
    rows = torch.arange(stack.shape[1], device=stack.device).unsqueeze(1)
    return [(rows >= first) & (rows < first + height) for first in range(0, len(rows), height)]
