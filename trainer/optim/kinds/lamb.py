"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW with a trust ratio for each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.optim.blockwise import BlockwiseAdam
from trainer.optim.groups import Group
from trainer.optim.kinds import adamw
from trainer.partition import layer_shape, whole_norms


@dataclass(frozen=True)
class Config(adamw.Config):
    """LAMB, for large batches: AdamW that scales each tensor's update to the norm of its weights.

    Clipping to `training.max_grad_norm` 1.0, the default, is called
    pre-normalizing the gradient in NVIDIA's code.

    Attributes:
        lr: peak learning rate of the schedule: the fraction of its norm by which an update changes
            a tensor.
        variant: which tensors are scaled: `paper` scales all of them; `nvidia` scales matrices
            only, as the code of NVIDIA and Google does, and gives biases and norm weights Adam's
            update.
        max_trust_ratio: upper bound of the scale (Fong et al. 2020); null sets none.
    """

    lr: float = 1e-3
    variant: Literal["paper", "nvidia"] = "paper"
    max_trust_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_trust_ratio is not None and not 0 < self.max_trust_ratio < math.inf:
            raise ConfigError(
                f"max_trust_ratio is {self.max_trust_ratio}. "
                "Use a finite number above 0, or null for no bound."
            )

    def _optimizer(self, groups: list[Group], blocks: Mapping[Tensor, int], exact: bool) -> Lamb:
        return Lamb(groups, blocks, self, exact)


class Lamb(BlockwiseAdam):
    r"""LAMB, algorithm 2 of the paper. A tensor x of weights becomes

        x - lr * ratio * u    with    u = m / (sqrt(v) + eps) + decay * x,    ratio = |x| / |u|

    where m and v are Adam's running means, corrected for bias, and the trust ratio is 1 if one of
    the norms is 0. The paper's phi is the identity here. Norms are of whole tensors, however they
    are partitioned; all else is local.
    """

    # The trust ratio is one number for each matrix of each layer. So u gives a step its direction,
    # and lr alone its length relative to the weights: with |x| = 2, |u| = 40 and lr = 0.01, x
    # changes by 0.01 * (2 / 40) * 40 = 0.02, which is 1 % of |x|, whatever the gradient's scale.

    def __init__(
        self, groups: list[Group], blocks: Mapping[Tensor, int], config: Config, exact: bool
    ) -> None:
        super().__init__(groups, blocks, config._settings, exact)
        self._config = config

    def _scales(
        self,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
    ) -> list[Tensor]:
        counts = self._counts_of(weights)
        # Norms of weights and of updates together, for one collective instead of two.
        norms = whole_norms([*blocks, *updates], weights[0], counts + counts, self.exact)
        weight_norms, update_norms = norms.chunk(2)
        # Zeros must be able to grow, and a tensor without an update stays finite.
        has_ratio = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(has_ratio, weight_norms / update_norms, 1.0)
        if self._config.max_trust_ratio is not None:
            ratios = ratios.clamp(max=self._config.max_trust_ratio)
        finite = self._finite(ratios)
        factors = self._factors(ratios * finite, weights, blocks)
        if self._config.variant == "paper":
            return factors
        unscaled = finite.to(blocks[0].dtype)
        dimensions = [len(layer_shape(weight)) for weight in weights for _ in self._counts[weight]]
        return [
            factor if count > 1 else unscaled
            for factor, count in zip(factors, dimensions, strict=True)
        ]
