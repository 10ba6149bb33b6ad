"""AdamW whose update of each tensor is scaled by the root mean square of its weights (Nawrot 2023, nanoT5)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.optim import Structure, adamw
from trainer.optim.blockwise import MIN_RMS, BlockwiseAdam
from trainer.optim.groups import Group, parameter_groups
from trainer.partition import local_parts, whole_norms


@dataclass(frozen=True)
class Config(adamw.Config):
    """AdamW scaled as Adafactor is, by the root mean square of the weights; T5 trains well with it (nanoT5).

    Attributes:
        lr: learning rate at the top of the schedule, relative to the root mean square of a tensor's weights.
    """

    lr: float = 2e-2
    weight_decay: float = 0.0

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on."""
        named = list(parameters)
        return AdamWScale(
            parameter_groups(named, self.weight_decay, self.layer_decay, structure.layers_above),
            blocks={
                parameter: structure.stacked[name]
                for name, parameter in named
                if name in structure.stacked
            },
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            bias_correction=self.bias_correction,
        )


class AdamWScale(BlockwiseAdam):
    r"""`AdamWScale` of nanoT5. A tensor x of weights becomes

        (x - lr * max(0.001, RMS(x)) * u) * (1 - lr * decay)    with    u = (m / c1) / ((sqrt(v) + eps) / c2)

    where m and v are Adam's running means and, at update t, c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t); both are 1
    without bias correction. RMS(x) is that of the whole tensor, however it is split; the rest is local.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        super().step()
        for group, weights, _ in self._members():
            if group["weight_decay"]:
                self._shrink(local_parts(weights), group["lr"] * group["weight_decay"])

    def _adam(self, group: Group, weights: list[Tensor]) -> list[Tensor]:
        if group["bias_correction"]:  # the kernel's u is (m / c1) / (sqrt(v) / c2 + eps)
            group = {
                **group,
                "eps": group["eps"] / math.sqrt(1 - group["betas"][1] ** group["updates"]),
            }
        return super()._adam(group, weights)

    def _scales(
        self, weights: list[Tensor], blocks: list[Tensor], changes: list[Tensor]
    ) -> list[Tensor]:
        rms = (
            whole_norms(blocks, weights[0], self._counts_of(weights)) / self._sizes(weights).sqrt()
        )
        return self._factors(rms.clamp(min=MIN_RMS), weights, blocks)
