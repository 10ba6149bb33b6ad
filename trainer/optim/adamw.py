"""AdamW (Loshchilov & Hutter 2019), with Adam's bias correction or, as BERT was trained, without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trainer.accelerators import kernels
from trainer.errors import ConfigError
from trainer.optim import Structure
from trainer.optim.blockwise import DecayedAdam
from trainer.optim.groups import Group, parameter_groups


@dataclass(frozen=True)
class Config:
    """AdamW. Biases and norm weights do not decay.

    Attributes:
        lr: learning rate at the top of the schedule.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the root of the mean square, which is 0 for weights that have had no gradient yet.
        weight_decay: decoupled; each update takes lr * weight_decay of a weight away.
        bias_correction: whether the running means are corrected for having started at 0; BERT's are not.
        layer_decay: for fine-tuning: what the learning rate is multiplied by from each layer to the one below it
            (Clark et al. 2020: 0.8 to 0.95); 1 leaves it the same for all.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas is {list(self.betas)}; use two numbers from 0 up to below 1, as [0.9, 0.999]"
            )
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}; use a number of 0 or more")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"layer_decay is {self.layer_decay}; use 1 for none, or a share as 0.9"
            )
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps is {self.eps}; use a number above 0, as 1e-6")

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on."""
        groups = parameter_groups(
            parameters, self.weight_decay, self.layer_decay, structure.layers_above
        )
        if not kernels.has_fused_optimizers(groups[0]["params"][0].device):
            return TracedAdamW(
                groups,
                {},
                lr=self.lr,
                betas=self.betas,
                eps=self.eps,
                bias_correction=self.bias_correction,
            )
        fused = AdamW if self.bias_correction else UncorrectedAdamW
        return fused(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class UncorrectedAdamW(AdamW):
    r"""AdamW without bias correction (`AdamWeightDecayOptimizer` of google-research/bert), on torch's fused kernels.

    BERT's update is w -= lr * (m / (sqrt(v) + eps) + decay * w). Torch's, at update t, is
    w -= lr' * ((m / c1) / (sqrt(v) / c2 + eps') + decay' * w) with c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t). They
    are equal with

        lr' = lr * c1 / c2,    eps' = eps / c2,    decay' = decay * c2 / c1

    because lr' * c2 / c1 = lr, eps' * c2 = eps and lr' * decay' = lr * decay.

    The number of updates is kept on the host, in each group's "updates", so that no step waits for the device.
    """

    def __init__(
        self, groups: list[Group], lr: float, betas: tuple[float, float], eps: float, fused: bool
    ) -> None:
        counted = [{**group, "updates": 0} for group in groups]
        super().__init__(counted, lr=lr, betas=betas, eps=eps, fused=fused)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one update; before and after it the groups hold the settings of BERT's formula."""
        settings = [
            {key: group[key] for key in ("lr", "eps", "weight_decay")}
            for group in self.param_groups
        ]
        for group in self.param_groups:
            group["updates"] += 1
            beta1, beta2 = group["betas"]
            c1, c2 = 1 - beta1 ** group["updates"], math.sqrt(1 - beta2 ** group["updates"])
            group["lr"] *= c1 / c2
            group["eps"] /= c2
            group["weight_decay"] *= c2 / c1
        try:
            loss: float | None = super().step(closure)
        finally:
            for group, setting in zip(self.param_groups, settings, strict=True):
                group.update(setting)
        return loss


class TracedAdamW(DecayedAdam):
    """AdamW of plain operations, for devices that torch has no fused kernels for."""

    def _scales(
        self, weights: list[Tensor], blocks: list[Tensor], changes: list[Tensor]
    ) -> list[Tensor]:
        return list(
            torch.ones(len(blocks), dtype=blocks[0].dtype, device=blocks[0].device).unbind()
        )
