"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW whose update of each tensor is scaled to the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optim import Structure, adamw
from trainer.optim.blockwise import DecayedAdam
from trainer.optim.groups import parameter_groups
from trainer.partition import layer_shape, whole_norms


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
            raise ConfigError(
                f"max_trust_ratio is {self.max_trust_ratio}; use a number above 0, or null for no bound"
            )

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),  # noqa: B008
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on."""
        named = list(parameters)
        return Lamb(
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
            scale_vectors=self.variant == "paper",
            max_trust_ratio=self.max_trust_ratio,
        )


class Lamb(DecayedAdam):
    r"""LAMB, algorithm 2 of the paper. A tensor x of weights becomes

        x - lr * ratio * u    with    u = m / (sqrt(v) + eps) + decay * x    and    ratio = |x| / |u|

    where m and v are Adam's running means, corrected for bias, and the trust ratio is 1 if one of the norms is 0. (The
    phi of the paper is the identity here, and the ratio may be bounded.) The norms are those of whole tensors, however
    they are split; the rest is local.
    """

    def _scales(
        self, weights: list[Tensor], blocks: list[Tensor], changes: list[Tensor]
    ) -> list[Tensor]:
        counts = self._counts_of(weights)
        weight_norms, update_norms = whole_norms(
            [*blocks, *changes], weights[0], counts + counts
        ).chunk(2)
        ratios = torch.where(
            (weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0
        )
        if self.defaults["max_trust_ratio"] is not None:
            ratios = ratios.clamp(max=self.defaults["max_trust_ratio"])
        kept = self._kept(ratios)
        factors, one = self._factors(ratios * kept, weights, blocks), kept.to(blocks[0].dtype)
        dimensions = [len(layer_shape(weight)) for weight in weights for _ in self._counts[weight]]
        scaled = (count > 1 or self.defaults["scale_vectors"] for count in dimensions)
        return [factor if each else one for factor, each in zip(factors, scaled, strict=True)]
