"""AdamW that scales each tensor's update by the RMS of its weights (nanoT5, Nawrot 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.optim.blockwise import MIN_RMS, BlockwiseAdam
from trainer.optim.groups import Group
from trainer.optim.kinds import adamw
from trainer.partition import local_parts, whole_norms


@dataclass(frozen=True)
class Config(adamw.Config):
    """AdamW whose updates scale with the root mean square of the weights, as in Adafactor.

    nanoT5 trains T5 with it.

    Attributes:
        lr: peak learning rate of the schedule, relative to the root mean square of a tensor's
            weights.
    """

    lr: float = 2e-2
    weight_decay: float = 0.0

    def _optimizer(
        self, groups: list[Group], blocks: Mapping[Tensor, int], exact: bool
    ) -> AdamWScale:
        return AdamWScale(groups, blocks, self._settings, exact)


class AdamWScale(BlockwiseAdam):
    r"""`AdamWScale` of nanoT5. A tensor x of weights becomes

        (x - lr * max(0.001, RMS(x)) * u) * (1 - lr * decay)
        with    u = (m / c1) / ((sqrt(v) + eps) / c2)

    where m and v are Adam's running means and, at update t, c1 = 1 - beta1^t and
    c2 = sqrt(1 - beta2^t); both are 1 without bias correction. RMS(x) is the root mean square of
    the whole tensor, however it is partitioned; all else is local.
    """

    decay_in_update = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update; none where loss scaling has found gradients that are not finite."""
        super().step()
        # nanoT5 decays after the update, so the update is shrunk as well.
        for group, weights, _ in self._members():
            if group["weight_decay"]:
                self._shrink(local_parts(weights), group["lr"] * group["weight_decay"])

    def _adam(self, group: Group, weights: list[Tensor]) -> list[Tensor]:
        if group["bias_correction"]:
            # Adam computes (m / c1) / (sqrt(v) / c2 + eps'). With eps' = eps / c2 this is u.
            c2 = math.sqrt(1 - group["betas"][1] ** group["updates"])
            group = {**group, "eps": group["eps"] / c2}
        return super()._adam(group, weights)

    def _scales(
        self,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
    ) -> list[Tensor]:
        norms = whole_norms(blocks, weights[0], self._counts_of(weights), self.exact)
        rms = norms / self._sizes(weights).sqrt()
        return self._factors(rms.clamp(min=MIN_RMS), weights, blocks)
