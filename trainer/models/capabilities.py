"""What modules of a model may offer to those who configure a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class UsesKernel(Protocol):
    """An attention module whose kernel a strategy can replace.

    Attributes:
        kernel: called like `scaled_dot_product_attention`.
        dropout: dropout rate of attention probabilities, which fused kernels do not support.
    """

    kernel: Callable[..., Tensor]
    dropout: float


@runtime_checkable
class Recomputes(Protocol):
    """A module that supports activation checkpointing."""

    checkpointing: bool


@runtime_checkable
class FeedsResidual(Protocol):
    """A module whose output enters the residual stream or a projection: embeddings, norms.

    Attributes:
        stream_dtype: the dtype of its output; None: as it is computed.
    """

    stream_dtype: torch.dtype | None
