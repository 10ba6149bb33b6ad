"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum.

The matrices of layers get Muon's update, scaled as in Moonlight (Liu et al. 2025, arXiv
2502.16982); embeddings, heads, norms and biases get AdamW's, from the same optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import ConfigError
from trainer.optim import Structure
from trainer.optim.blockwise import AdamMoments, number
from trainer.optim.exchange import Exchange
from trainer.optim.groups import Group
from trainer.optim.kinds import adamw
from trainer.partition import StackedParameter, layer_shape, local_parts

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration: the steepest at 0 whose limit stays near 1 (Jordan et al.)."""

_EPS = 1e-7
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Config(adamw.Config):
    """Muon for the matrices of layers, AdamW for everything else.

    Attributes:
        momentum: decay rate of the running mean of the gradient.
        nesterov: whether the update looks one step ahead.
        ns_steps: steps of the Newton-Schulz iteration, which makes all singular values about 1.
        ns_precision: its number format. bf16 is faster on GPUs, and its rounding differs between
            devices.
        adjust_lr: factor on the learning rate of a matrix of m x n. `match_rms_adamw`:
            0.2 * sqrt(max(m, n)), so that learning rate and weight decay are AdamW's (Liu et al.
            2025, eq. 4). `original`: sqrt(max(1, m / n)).
        adamw_lr_scale: factor on the learning rate of the parameters that AdamW updates.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_precision: Literal["fp32", "bf16"] = "fp32"
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}. Use a number from 0 to below 1.")
        if self.ns_steps < 1:
            raise ConfigError(f"ns_steps is {self.ns_steps}. Use 1 or more, such as 5.")
        if not 0 < self.adamw_lr_scale < math.inf:
            raise ConfigError(
                f"adamw_lr_scale is {self.adamw_lr_scale}. Use a finite number above 0."
            )

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        named = list(parameters)
        groups: list[Group] = []
        # The matrices of layers first. Groups stay in this order, by which states are found again.
        for muon in (True, False):
            own = [(name, each) for name, each in named if (name in structure.matrices) == muon]
            for group in self._groups(own, structure):
                scale = 1.0 if muon else self.adamw_lr_scale
                groups.append({**group, "muon": muon, "lr_scale": group["lr_scale"] * scale})
        return Muon(groups, structure.blocks(named), self, structure.exact)


class Muon(AdamMoments):
    r"""Muon and AdamW. A matrix x with gradient g becomes

        x - lr * (decay * x + adjust * orthogonal(u))
        with    m += (1 - momentum) * (g - m),    u = g + momentum * (m - g)

    and without `nesterov` u = m. `orthogonal` makes the singular values of a matrix about 1. It
    needs the whole matrix: each one is collected on one rank of those that it is partitioned over,
    and the result is sent back (see `Exchange`). All else is local.
    """

    def __init__(
        self, groups: list[Group], blocks: Mapping[Tensor, int], config: Config, exact: bool
    ) -> None:
        super().__init__(groups, blocks, config._settings, exact)
        self._config = config
        self._exchanges: dict[tuple[Tensor, ...], Exchange] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        members, weights = self._begin_update()
        finite = self._finite(weights[0])
        matrices = [weight for group, own, _ in members if group["muon"] for weight in own]
        updates = iter(self._orthogonal(matrices) if matrices else ())
        for group, own, _ in members:
            factor = number(-group["lr"], finite) * finite
            if not group["muon"]:
                parts, adam = local_parts(own), self._adam(group, own)
                factors = [factor.to(parts[0].dtype)] * len(parts)
                torch._foreach_addcmul_(parts, adam, factors)
                continue
            blocks = self._blocks(own, local_parts(own))
            # Decay before the step, as torch does: it shrinks the weight before this update.
            self._shrink(blocks, group["lr"] * group["weight_decay"])
            shapes = [self._shape(weight) for weight in own for _ in self._counts[weight]]
            changes = [next(updates).view_as(block) for block in blocks]
            factors = self._adjusted(factor, shapes, blocks[0].dtype)
            torch._foreach_addcmul_(blocks, changes, factors)

    def _orthogonal(self, weights: list[Tensor]) -> list[Tensor]:
        """Updates the momentum; returns the local part of each block's orthogonalized update."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {"momentum": torch.zeros_like(weight)}
        moments = local_parts(self.state[weight]["momentum"] for weight in weights)
        gradients = local_parts(weight.grad for weight in weights if weight.grad is not None)
        if self.grad_scale is not None and self.found_inf is not None:
            # Momentum in place of gradients that overflowed: the mean of both is itself.
            torch._foreach_mul_(gradients, 1 / self.grad_scale)
            overflowed = self.found_inf.bool()
            pairs = zip(moments, gradients, strict=True)
            gradients = [torch.where(overflowed, m, g) for m, g in pairs]
        momentum = self._config.momentum
        # The mean of local parts is local; only the orthogonalization below needs whole matrices.
        torch._foreach_lerp_(moments, gradients, 1 - momentum)
        updates = moments
        if self._config.nesterov:
            updates = list(torch._foreach_lerp(gradients, moments, momentum))
        return self._orthogonalized(weights, self._blocks(weights, updates))

    def _orthogonalized(self, weights: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
        if any(isinstance(weight, StackedParameter) for weight in weights):
            # Nothing is partitioned, and a stack is a batch of matrices.
            shapes = [self._shape(weight) for weight in weights for _ in self._counts[weight]]
            pairs = zip(blocks, shapes, strict=True)
            return [self._newton_schulz(block.reshape(-1, *shape)) for block, shape in pairs]
        # Phases may give gradients to other parameters. Each set of them has its own exchange.
        key = tuple(weights)
        if key not in self._exchanges:
            parts = [(len(self._counts[weight]), *self._shape(weight)) for weight in weights]
            self._exchanges[key] = Exchange(weights, parts)
        exchange = self._exchanges[key]
        whole = exchange.collect(blocks)
        return exchange.spread({i: self._newton_schulz(each) for i, each in whole.items()})

    def _shape(self, weight: Tensor) -> tuple[int, int]:
        """Rows and columns of each matrix in a parameter."""
        *_, rows, columns = layer_shape(weight)
        layers = len(weight) if isinstance(weight, StackedParameter) else 1
        return rows * layers // len(self._block_sizes[weight]), columns

    def _adjusted(
        self, factor: Tensor, shapes: list[tuple[int, int]], dtype: torch.dtype
    ) -> list[Tensor]:
        """The factor of each matrix's update; matrices of equal shape share a tensor."""
        distinct = dict.fromkeys(shapes)  # in order, as a compiled graph needs
        by_shape = {shape: (self._adjust(shape) * factor).to(dtype) for shape in distinct}
        return [by_shape[shape] for shape in shapes]

    def _adjust(self, shape: tuple[int, int]) -> float:
        """The factor on the learning rate of a matrix."""
        if self._config.adjust_lr == "original":
            return math.sqrt(max(1, shape[0] / shape[1]))
        return 0.2 * math.sqrt(max(shape))

    def _newton_schulz(self, matrix: Tensor) -> Tensor:
        """Makes the singular values about 1: [..., m, n] -> the same shape and dtype.

        x <- a x + (b (x x') + c (x x')^2) x, a polynomial in the singular values of x; its
        coefficients bring any value from (0, 1] to between 0.7 and 1.2 in five steps.
        """
        a, b, c = _COEFFICIENTS
        wide = matrix.shape[-2] <= matrix.shape[-1]
        x = matrix.to(_DTYPES[self._config.ns_precision])
        x = x if wide else x.mT  # x x' is the smaller of the two products
        # The Frobenius norm bounds the largest singular value.
        x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
        multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
        for _ in range(self._config.ns_steps):
            gram = x @ x.mT
            polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
            x = multiply_add(x, polynomial, x, beta=a)
        return (x if wide else x.mT).to(matrix.dtype)
