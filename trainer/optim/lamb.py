"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW whose update of each tensor is scaled to the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam

from trainer.errors import ConfigError
from trainer.optim import adamw
from trainer.optim.groups import parameter_groups
from trainer.partition import local_parts, row_bounds, whole_norms


@dataclass(frozen=True)
class Config(adamw.Config):
    """LAMB, for large batches: AdamW whose update of each tensor is scaled to the norm of the tensor's weights.

    Clipping to `training.max_grad_norm` 1.0, the default, is what NVIDIA's code calls pre-normalising the gradient.

    Attributes:
        lr: learning rate at the top of the schedule: the share of its norm that an update changes a tensor by.
        variant: which tensors are scaled: all of them as in the paper, or as in the code of NVIDIA and Google the
            matrices, while biases and norm weights get the update of Adam.
        max_trust_ratio: upper bound of the scale (Fong et al. 2020); null sets none.
    """

    lr: float = 1e-3
    variant: Literal["paper", "nvidia"] = "paper"
    max_trust_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_trust_ratio is not None and not 0 < self.max_trust_ratio < math.inf:
            raise ConfigError(f"max_trust_ratio is {self.max_trust_ratio}; use a number above 0, or null for no bound")

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], stacked: Mapping[str, int] = MappingProxyType({})
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on.

        Args:
            parameters: by name.
            stacked: how many tensors of equal size lie in a parameter's rows, by its name, where there are several.
                Each has a trust ratio of its own.
        """
        named = list(parameters)
        return Lamb(
            parameter_groups(named, self.weight_decay),
            blocks={parameter: stacked[name] for name, parameter in named if name in stacked},
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            bias_correction=self.bias_correction,
            scale_vectors=self.variant == "paper",
            max_trust_ratio=self.max_trust_ratio,
        )


class Lamb(Optimizer):
    r"""LAMB, algorithm 2 of the paper. A tensor x of weights becomes

        x - lr * ratio * u    with    u = m / (sqrt(v) + eps) + decay * x    and    ratio = |x| / |u|

    where m and v are Adam's running means, corrected for bias, and the trust ratio is 1 if one of the norms is 0. (The
    phi of the paper is the identity here, and the ratio may be bounded.) The norms are those of whole tensors, however
    they are split; the rest is local. A parameter in which several tensors are stacked counts as several.

    As UncorrectedAdamW, it counts updates on the host, so that no step waits for the device.
    """

    def __init__(self, groups: list[dict[str, Any]], blocks: Mapping[Tensor, int], **settings: Any) -> None:
        super().__init__([{**group, "updates": 0} for group in groups], settings)
        self._bounds = {
            weight: row_bounds(weight, blocks.get(weight, 1)) for group in groups for weight in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where `found_inf`, which loss scaling sets as for torch's fused optimizers, is 1."""
        groups = [[each for each in group["params"] if each.grad is not None] for group in self.param_groups]
        weights = [weight for members in groups for weight in members]
        pairs = list(zip(self.param_groups, groups, strict=True))
        updates = [update for group, members in pairs for update in self._adam(group, members)]
        blocks = self._blocks(weights, local_parts(weights))
        changes = self._blocks(weights, updates)
        scales = self._scales(blocks, changes, weights[0])
        start = 0
        for group, members in pairs:
            part = slice(start, start + sum(len(self._bounds[weight]) - 1 for weight in members))
            torch._foreach_addcmul_(blocks[part], changes[part], scales[part], value=-group["lr"])
            start = part.stop

    def _blocks(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """The rows of each tensor that has a trust ratio, out of local parts that lie as those of the weights."""
        bounds = [self._bounds[weight] for weight in weights]
        return [part[i:j] for part, ends in zip(parts, bounds, strict=True) for i, j in pairwise(ends)]

    def _adam(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Brings the running means up to date; returns the u of each weight, as much of it as this process holds.

        Torch's fused kernel, started from zeros with a learning rate of -1, leaves m / (sqrt(v) + eps) behind.
        """
        group["updates"] += 1
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        parts = local_parts(weights)
        updates = [torch.zeros_like(part) for part in parts]
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
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        torch._foreach_add_(updates, parts, alpha=group["weight_decay"])
        return updates

    def _scales(self, weights: list[Tensor], updates: list[Tensor], like: Tensor) -> list[Tensor]:
        """What the update of each tensor is multiplied by, the learning rate left out; scalars on the device."""
        weight_norms, update_norms = whole_norms([*weights, *updates], like).chunk(2)
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        if self.defaults["max_trust_ratio"] is not None:
            ratios = ratios.clamp(max=self.defaults["max_trust_ratio"])
        found_inf = getattr(self, "found_inf", None)
        one = torch.ones((), device=ratios.device) if found_inf is None else 1 - found_inf
        scaled = (weight.ndim > 1 or self.defaults["scale_vectors"] for weight in weights)
        return [ratio if each else one for ratio, each in zip((ratios * one).to(updates[0].dtype), scaled, strict=True)]
