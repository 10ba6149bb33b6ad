"""Norms, computed in fp32 whatever the precision of input and parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., D]."""
        # torch's stubs do not know that bias=False makes it None.
        bias: Tensor | None = self.bias
        bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square (Zhang & Sennrich 2019): no mean, no bias."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., D]."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
