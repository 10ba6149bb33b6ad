"""Norms, computed in fp32 whatever the precision of input and parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al. 2016).

    Attributes:
        stream_dtype: see `FeedsResidual`; None keeps fp32.
    """

    stream_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        # torch's stubs do not know that bias=False makes it None.
        bias: Tensor | None = self.bias
        bias = None if bias is None else bias.float()
        weight = self.weight.float()
        out = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)
        return out if self.stream_dtype is None else out.to(self.stream_dtype)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square (Zhang & Sennrich 2019): no mean, no bias.

    Attributes:
        stream_dtype: see `FeedsResidual`; None keeps fp32.
    """

    stream_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out = F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return out if self.stream_dtype is None else out.to(self.stream_dtype)
