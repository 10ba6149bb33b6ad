"""The mean of a text's hidden states in place of one position, below a head that pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.extras import Extra


class MeanPooling(Extra):
    """Gives every position the mean of its segment.

    Args:
        dense: width of a layer with GELU whose outputs are averaged; None: the states themselves.
    """

    name = "pooling"
    is_below_head = True
    needs_positions = "all"

    def __init__(self, dense: int | None) -> None:
        super().__init__()
        self.dense = None if dense is None else nn.Linear(dense, dense)

    def below_head(
        self,
        hidden: Tensor,
        layers: Sequence[Tensor],
        segments: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        if self.dense is not None:
            hidden = F.gelu(self.dense(hidden))
        if segments is None:
            return hidden.mean(1, keepdim=True).expand_as(hidden)
        # With segments 1 1 2 0, the rows of weights are 1/2 1/2 0 0 (twice), 0 0 1 0 and 0 0 0 1.
        same = (segments[:, :, None] == segments[:, None, :]).to(hidden.dtype)
        return (same / same.sum(-1, keepdim=True)) @ hidden
