"""Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): second moments as row and column means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import ConfigError
from trainer.optim import Structure
from trainer.optim.blockwise import MIN_RMS, Blockwise, number
from trainer.optim.groups import Group, parameter_groups
from trainer.partition import (
    StackedParameter,
    add_up,
    exact,
    exact_sums,
    flat_start,
    layer_shape,
    local_parts,
    rectangles,
    squared_norms,
    whole_shape,
    whole_squares,
)


@dataclass(frozen=True)
class Config:
    """Adafactor, as T5 was trained: a row and a column of memory where Adam keeps two matrices.

    Attributes:
        lr: peak learning rate of the schedule, relative to the root mean square of a tensor's
            weights if `scale_by_rms` is true. The paper's "relative step" is lr 0.01 with schedule
            {decay: inverse_sqrt, decay_start: 10000}.
        scale_by_rms: multiplies each tensor's update by the root mean square of its weights, at
            least 0.001.
        clip_threshold: upper bound of the root mean square of a tensor's update, before scaling.
        decay_rate: update t gives the squared gradient a weight of t^-decay_rate in the second
            moments.
        beta1: decay rate of the running mean of updates; 0 keeps none, which saves its memory.
        eps: added to squared gradients.
        weight_decay: decoupled; each update shrinks a matrix by lr * weight_decay of its value.
        min_dim_size_to_factor: matrices with fewer rows or columns keep full second moments.
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
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}. Use a finite number of at least 0.")
        for name in ("clip_threshold", "decay_rate"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}. Use a finite number above 0.")
        if not 0 <= self.beta1 < 1:
            raise ConfigError(f"beta1 is {self.beta1}. Use a number below 1, or 0 for no mean.")
        if not 1e-37 <= self.eps < math.inf:  # the least that fp32 holds in full precision
            raise ConfigError(f"eps is {self.eps}. Use a number of at least 1e-37, such as 1e-30.")
        if self.min_dim_size_to_factor < 0:
            raise ConfigError(
                f"min_dim_size_to_factor is {self.min_dim_size_to_factor}. Use 0 or more."
            )

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Builds the optimizer of these named parameters, on the device they are on."""
        named = list(parameters)
        groups = parameter_groups(named, self.weight_decay)
        return Adafactor(groups, structure.blocks(named), self, structure.exact)


class Adafactor(Blockwise):
    r"""Adafactor, algorithms 4 and 5 of the paper. A tensor x of weights with gradient g becomes

        x - lr * max(0.001, RMS(x)) * u / max(1, RMS(u) / clip_threshold)    with    u = g / sqrt(v)

    where v is the running mean of g^2 + eps, at update t with a decay rate of 1 - t^-decay_rate. A
    matrix keeps only the means r over each row and c over each column of v, and

        v_ij = r_i c_j / mean(c)

    (The paper divides by mean(r), which is the same number.) A step takes two collectives for all
    tensors together. The update is computed in the memory of the gradients, which are lost.
    """

    # Example: with v = [[1, 2], [3, 6]], r = [1.5, 4.5], c = [2, 4] and mean(c) = 3, and r_2 c_1 /
    # 3 = 4.5 * 2 / 3 = 3. It is exact because this v has rank 1; otherwise it is the closest such
    # matrix by generalized KL divergence (section 3 of the paper).
    #
    # Every process holds r and c whole: they are small, and a partition by rows needs all of c. The
    # first collective adds up r, c and x^2; the second adds up u^2, which depends on r and c.

    def __init__(
        self, groups: list[Group], blocks: Mapping[Tensor, int], config: Config, exact: bool
    ) -> None:
        super().__init__(groups, blocks, {"lr": config.lr}, exact)
        self._config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        members, weights = self._begin_update()
        for weight in weights:
            if not self.state[weight]:
                self._create_state(weight)
        blocks, gradients = self._blocks(weights, local_parts(weights)), self._gradients(weights)
        counts, sizes = self._counts_of(weights), self._sizes(weights)
        factored = [weight for weight in weights if "exp_avg_sq" not in self.state[weight]]
        means = self._exact_means if self.exact else self._means
        weight_squares, row_and_column_means = means(weights, gradients, factored, blocks)
        self._update_moments(weights, gradients, factored, row_and_column_means)
        self._precondition(weights, gradients)
        updates = self._blocks(weights, gradients)
        update_squares = whole_squares(updates, weights[0], counts, self.exact)
        update_rms = (update_squares / sizes).sqrt()
        scales = 1 / (update_rms / self._config.clip_threshold).clamp(min=1)
        if self._config.scale_by_rms:
            scales *= (weight_squares / sizes).sqrt().clamp(min=MIN_RMS)
        factors = self._factors(scales, weights, blocks)
        for group, own, entries in members:
            self._apply(group, own, blocks[entries], updates[entries], factors[entries])

    def _create_state(self, weight: Tensor) -> None:
        """Creates the second moments of gradients that have been 0 so far."""
        state, eps = self.state[weight], self._config.eps
        is_matrix = len(layer_shape(weight)) == 2
        least = self._config.min_dim_size_to_factor
        if is_matrix and min(self._block_shape(weight)[1:]) >= least:
            *stack, rows, columns = whole_shape(weight)
            blocks = rows // self._block_shape(weight)[1]  # of each layer in a stack
            full = partial(torch.full, fill_value=eps, dtype=weight.dtype, device=weight.device)
            state["exp_avg_sq_row"] = full((*stack, rows))
            state["exp_avg_sq_col"] = full((*stack, blocks, columns))
        else:
            state["exp_avg_sq"] = torch.full_like(weight, eps)
        if self._config.beta1 > 0:
            state["exp_avg"] = torch.zeros_like(weight)

    def _gradients(self, weights: list[Tensor]) -> list[Tensor]:
        """Local parts of the gradients, without loss scaling; 0 where any is not finite."""
        gradients = local_parts(weight.grad for weight in weights if weight.grad is not None)
        if self.grad_scale is not None and self.found_inf is not None:
            torch._foreach_mul_(gradients, 1 / self.grad_scale)
            for gradient in gradients:
                gradient.masked_fill_(self.found_inf.bool(), 0)
        return gradients

    def _means(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        factored: list[Tensor],
        blocks: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Squared norms of whole blocks, and means of squared gradients; one collective.

        Returns:
            [blocks], fp64; and row means and column means, flat, of each factored weight.
        """
        sums = [squared_norms(blocks, self._counts_of(weights))]
        # One matrix after the other: the squares of all would be another copy of the model.
        gradient_of = dict(zip(weights, gradients, strict=True))
        for weight in factored:
            sums += self._local_means(weight, gradient_of[weight].square())
        totals = add_up(torch.cat([each.flatten() for each in sums]), weights[0])
        squares, *means = torch.split(totals, [each.numel() for each in sums])
        return squares, means

    def _exact_means(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        factored: list[Tensor],
        blocks: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Like `_means`, with the same bits under any partition; four collectives."""
        counts = self._counts_of(weights)
        squares = whole_squares(blocks, weights[0], counts, is_exact=True)
        if not factored:
            return squares, []
        gradient_of = dict(zip(weights, gradients, strict=True))
        shapes = [self._block_shape(weight)[1:] for weight in factored]

        def add(number: int, squares: Tensor, bound: Tensor) -> Tensor:
            # A row has fewer terms than a column of a table of embeddings, and small rows count:
            # so it has finer words.
            rows, columns = shapes[number]
            of_rows, of_columns = (exact.split(squares, bound, each) for each in (columns, rows))
            sums = []
            for row_word, column_word in zip(of_rows, of_columns, strict=True):
                row_sums, _ = self._local_means(factored[number], row_word, divide=False)
                _, column_sums = self._local_means(factored[number], column_word, divide=False)
                sums.append(torch.cat((row_sums.flatten(), column_sums.flatten())))
            return torch.stack(sums)

        parts = [gradient_of[weight] for weight in factored]
        found = exact_sums(parts, weights[0], add)
        means: list[Tensor] = []
        for words, (rows, columns), weight in zip(found, shapes, factored, strict=True):
            lengths = [self.state[weight][f"exp_avg_sq_{each}"].numel() for each in ("row", "col")]
            row_sums, column_sums = torch.split(exact.total(words), lengths)
            means += [row_sums / columns, column_sums / rows]
        return squares, means

    def _update_moments(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        factored: list[Tensor],
        row_and_column_means: list[Tensor],
    ) -> None:
        """Updates the second moments: v = (1 - f) v + f (g^2 + eps) with f = t^-decay_rate.

        Args:
            weights: the parameters to update.
            gradients: their local parts.
            factored: the weights with row means and column means.
            row_and_column_means: of g^2 of each of them, flat.
        """
        # Full moments are local.
        pairs = [
            (self.state[weight]["exp_avg_sq"], gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
            if "exp_avg_sq" in self.state[weight]
        ]
        of_full = [gradient for _, gradient in pairs]
        means = list(torch._foreach_mul(of_full, of_full)) if pairs else []
        of_factored = [
            self.state[weight][f"exp_avg_sq_{each}"]
            for weight in factored
            for each in ("row", "col")
        ]
        for mean, moment in zip(row_and_column_means, of_factored, strict=True):
            means.append(mean.to(moment.dtype).view(moment.shape))
        fraction = self.param_groups[0]["updates"] ** -self._config.decay_rate
        moments = local_parts([moment for moment, _ in pairs] + of_factored)
        self._shrink(moments, fraction)
        torch._foreach_add_(means, self._config.eps)
        finite = self._finite(means[0])
        torch._foreach_mul_(means, (number(fraction, finite) * finite).to(means[0].dtype))
        torch._foreach_add_(moments, means)

    def _local_means(
        self, weight: Tensor, squared: Tensor, divide: bool = True
    ) -> tuple[Tensor, Tensor]:
        """This process's summands of a matrix's row means and column means, for each block.

        Args:
            divide: if not, the summands of row sums and column sums.
        """
        blocks, rows, columns = self._block_shape(weight)
        if isinstance(weight, StackedParameter):
            of_blocks = [squared.where(mask, 0).sum(1) for mask in _block_masks(squared, rows)]
            return squared.sum(2) / columns, torch.stack(of_blocks, 1) / rows
        row_means = squared.new_zeros(blocks, rows)
        column_means = squared.new_zeros(blocks, columns)
        height, width = (rows, columns) if divide else (1, 1)
        for part, row, column in self._rectangles(weight, squared):
            row_means[row] += part.sum(2) / width
            column_means[column] += part.sum(1) / height
        return row_means, column_means

    def _block_shape(self, weight: Tensor) -> tuple[int, int, int]:
        """Number of blocks, and rows and columns of each."""
        blocks, shape = len(self._block_sizes[weight]), whole_shape(weight)
        return blocks, math.prod(shape[:-1]) // blocks, shape[-1]

    def _rectangles(
        self,
        weight: Tensor,
        part: Tensor,
    ) -> Iterator[tuple[Tensor, tuple[slice, slice], tuple[slice, slice]]]:
        """Cuts the local part of a matrix into rectangles [blocks, rows, columns] of its blocks.

        Each comes with its place in arrays [blocks, rows] and in arrays [blocks, columns].
        """
        # A flat segment may begin and end inside a row. Of one block [3, 4], the elements 2:10 are
        # three rectangles: columns 2:4 of row 0, all of row 1, and columns 0:2 of row 2.
        for rectangle, offset in rectangles(part, flat_start(weight), self._block_shape(weight)):
            block, row, column = (
                slice(i, i + n) for i, n in zip(offset, rectangle.shape, strict=True)
            )
            yield rectangle, (block, row), (block, column)

    def _precondition(self, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Divides the local gradients by the square roots of their second moments, in place."""
        full = [i for i, weight in enumerate(weights) if "exp_avg_sq" in self.state[weight]]
        if full:
            moments = local_parts(self.state[weights[i]]["exp_avg_sq"] for i in full)
            torch._foreach_mul_([gradients[i] for i in full], torch._foreach_rsqrt(moments))
        for weight, gradient in zip(weights, gradients, strict=True):
            state = self.state[weight]
            if "exp_avg_sq" in state:
                continue
            # 1 / sqrt(v_ij) is a factor of row i, 1 / sqrt(r_i), and one of column j.
            row_factors, columns = state["exp_avg_sq_row"].rsqrt(), state["exp_avg_sq_col"]
            column_factors = columns.mean(-1, keepdim=True).sqrt() * columns.rsqrt()
            if isinstance(weight, StackedParameter):
                gradient.mul_(row_factors.unsqueeze(2))
                masks = _block_masks(gradient, self._block_shape(weight)[1])
                for mask, factor in zip(masks, column_factors.unbind(1), strict=True):
                    gradient.mul_(torch.where(mask, factor.unsqueeze(1), 1.0))
                continue
            row_factors = row_factors.view(len(columns), -1)
            for part, row, column in self._rectangles(weight, gradient):
                part.mul_(row_factors[row].unsqueeze(2)).mul_(column_factors[column].unsqueeze(1))

    def _apply(
        self,
        group: Group,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
        factors: list[Tensor],
    ) -> None:
        """Subtracts lr * factor * update, or its running mean, from a group's blocks."""
        beta1 = self._config.beta1
        if group["weight_decay"]:
            self._shrink(blocks, group["lr"] * group["weight_decay"])
        factors = list(torch._foreach_mul(factors, number(group["lr"], blocks[0])))
        if beta1 > 0:
            parts = local_parts(self.state[weight]["exp_avg"] for weight in weights)
            means = self._blocks(weights, parts)
            self._shrink(means, 1 - beta1)
            torch._foreach_addcmul_(means, updates, factors, value=1 - beta1)
            # Gradients that overflowed are 0 and left the means as they were. These must not be
            # applied once more.
            updates, factors = means, [self._finite(means[0]).to(means[0].dtype)] * len(means)
        torch._foreach_addcmul_(blocks, updates, factors, value=-1.0)


def _block_masks(stack: Tensor, height: int) -> list[Tensor]:
    """One mask [R, 1] for each block of `height` rows in the matrices [R, C] of a stack.

    Slicing the stack instead would make devices that hold some rows each exchange them.
    """
    rows = torch.arange(stack.shape[1], device=stack.device).unsqueeze(1)
    return [(rows >= first) & (rows < first + height) for first in range(0, len(rows), height)]
