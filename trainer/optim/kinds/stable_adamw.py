"""StableAdamW (Wortsman et al. 2023, arXiv 2304.13013): AdamW with Adafactor's update clipping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.optim.blockwise import BlockwiseAdam
from trainer.optim.groups import Group
from trainer.optim.kinds import adamw
from trainer.partition import local_parts, whole_norms


@dataclass(frozen=True)
class Config(adamw.Config):
    """AdamW that lowers the learning rate of a tensor whose gradient is unexpectedly large.

    ModernBERT was trained with it. It replaces gradient clipping: set training.max_grad_norm to
    null.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 1e-5

    def _optimizer(
        self, groups: list[Group], blocks: Mapping[Tensor, int], exact: bool
    ) -> StableAdamW:
        return StableAdamW(groups, blocks, self._settings, exact)


class StableAdamW(BlockwiseAdam):
    r"""StableAdamW, algorithm 2 of the paper. A tensor x of weights becomes

        x - lr / max(1, RMS) * (m / (sqrt(v) + eps) + decay * x)
        with    RMS = sqrt(mean(g^2 / max(v, eps^2)))

    where g is the gradient, and m and v are Adam's running means, corrected for bias. RMS is of the
    whole tensor, however it is partitioned; all else is local.
    """

    # RMS compares a gradient with its own history: it is about 1 while gradients stay alike, and
    # 10 for one that is ten times as large as v remembers. Such a step is made ten times shorter.

    def _scales(
        self,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
    ) -> list[Tensor]:
        ratios: list[Tensor] = []
        for group, own, _ in self._members():
            corrects = group["bias_correction"]
            c2 = 1 - group["betas"][1] ** group["updates"] if corrects else 1.0
            gradients = local_parts(weight.grad for weight in own if weight.grad is not None)
            squares = local_parts(self.state[weight]["exp_avg_sq"] for weight in own)
            # sqrt(max(v, eps^2)) is max(sqrt(v), eps): eps^2 = 1e-12 is kept from underflowing.
            roots = torch._foreach_sqrt(torch._foreach_div(squares, c2))
            torch._foreach_clamp_min_(roots, group["eps"])
            ratios += torch._foreach_div(gradients, roots)
        cut = self._blocks(weights, ratios)
        norms = whole_norms(cut, weights[0], self._counts_of(weights), self.exact)
        rms = norms / self._sizes(weights).sqrt()
        finite = self._finite(rms)
        # Where gradients overflowed, RMS is not a number, and nothing is updated.
        scales = torch.where(finite > 0, 1 / rms.clamp(min=1.0), 0.0)
        return self._factors(scales, weights, blocks)
