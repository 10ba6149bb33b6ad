"""One vector of a text from the hidden states of its tokens."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pool: TypeAlias = Literal["mean", "first", "last", "max", "weighted"]


def pool(hidden: Tensor, real: Tensor, how: Pool) -> Tensor:
    """[B, S, D] -> [B, D]; real: bool [B, S], False for the padding after each text."""
    if how == "first":
        return hidden[:, 0]
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), real.sum(1) - 1]
    # Padding must not count: the maximum of a padded position could be the highest.
    if how == "max":
        return hidden.masked_fill(~real[..., None], -torch.inf).amax(1)
    shares = real.to(hidden.dtype)
    if how == "weighted":
        # 3 tokens have the shares 1/6, 2/6, 3/6.
        shares = shares * torch.arange(1, real.shape[1] + 1, device=real.device)
    return (hidden * shares[..., None]).sum(1) / shares.sum(1, keepdim=True)
