"""ULMFiT's classifier of texts by recurrent states (Howard & Ruder 2018, section 3.3).

The state that decides about a text may be anywhere in it. So the classifier reads the last state,
and the maximum and the mean of each unit over all positions. The paper's blocks begin with batch
normalization, which is left out here: its means are over the rows of a micro-batch, and a row would
depend on how a batch is split.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.layers.attention import take
from trainer.models.layers.dropout import dropout, split_key


def concat_pool(hidden: Tensor, segments: Tensor | None) -> Tensor:
    """The last state, the maximum and the mean of a sequence: [B, S, P] -> [B, 3 P].

    Args:
        hidden: states in the order in which the layers have read the sequence.
        segments: int [B, S], 0 for padding on either side; None: no padding. A row holds one
            sequence, as the rows of tasks do.
    """
    batch, length, _ = hidden.shape
    if segments is None:
        segments = torch.ones(batch, length, dtype=torch.int32, device=hidden.device)
    is_text = segments > 0
    last = (torch.arange(length, device=hidden.device) * is_text).amax(1, keepdim=True)
    outside = ~is_text[..., None]
    highest = hidden.masked_fill(outside, float("-inf")).amax(1)
    total = hidden.masked_fill(outside, 0.0).sum(1)
    mean = total / is_text.sum(1, keepdim=True).to(total.dtype)
    return torch.cat([take(hidden, last)[:, 0], highest, mean], -1)


def pool_directions(hidden: Tensor, segments: Tensor | None, directions: int) -> Tensor:
    """Pools each direction by itself, in the order in which it has read: [B, S, D] -> [B, 3 D].

    Args:
        segments: see `concat_pool`.
        directions: 2: the second half of D are states of a backward LSTM; 1: there is none.
    """
    if directions == 1:
        return concat_pool(hidden, segments)
    ahead, back = hidden.chunk(2, -1)
    flipped = None if segments is None else segments.flip(1)
    return torch.cat([concat_pool(ahead, segments), concat_pool(back.flip(1), flipped)], -1)


class ConcatPoolHead(nn.Module):
    """Scores sequences by their pooled states: two linear layers with ReLU between them.

    Args:
        inputs: width of the pooled states.
        width: of the hidden layer.
        classes: C.
        dropouts: rates before the two layers.
    """

    def __init__(
        self, inputs: int, width: int, classes: int, dropouts: tuple[float, float]
    ) -> None:
        super().__init__()
        self.dropouts = dropouts
        self.dense = nn.Linear(inputs, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, pooled: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, inputs] -> logits [B, C]; key: int32 [B], None means no dropout."""
        keys = (None, None) if key is None else split_key(key, 2).unbind()
        before, between = self.dropouts
        inner = F.relu(self.dense(dropout(pooled, before, keys[0])))
        logits: Tensor = self.classifier(dropout(inner, between, keys[1]))
        return logits
