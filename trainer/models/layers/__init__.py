"""Parts of Transformers: attention, embeddings, dropout and the layers made of them.

Here: linear layers with names for the matrices fused in them; and norms, computed in fp32 whatever
the precision of input and parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """A projection in a Transformer layer; its rows may fuse several matrices.

    Attributes:
        parts: names of the equally sized matrices in its rows, such as ("query", "key", "value").
        into_residual: whether its output is added to the residual stream.
    """

    def __init__(
        self,
        width: int,
        out: int,
        parts: tuple[str, ...],
        *,
        bias: bool,
        into_residual: bool = False,
    ) -> None:
        super().__init__(width, out, bias=bias)
        self.parts = parts
        self.into_residual = into_residual


class WrappedProjection(Projection):
    """A projection that takes over the parameters of another one and replaces it."""

    def __init__(self, wrapped: Projection) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a matrix
        self.in_features, self.out_features = wrapped.in_features, wrapped.out_features
        self.weight, self.bias = wrapped.weight, wrapped.bias
        self.parts, self.into_residual = wrapped.parts, wrapped.into_residual


def put_in_place(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the module `name` of a model."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


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
