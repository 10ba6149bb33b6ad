"""AdamW without torch's fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.optim.blockwise import BlockwiseAdam


class PlainAdamW(BlockwiseAdam):
    """AdamW of plain operations: exact, and for devices without torch's fused kernels."""

    def _scales(
        self,
        weights: list[Tensor],
        blocks: list[Tensor],
        updates: list[Tensor],
    ) -> list[Tensor]:
        ones = torch.ones(len(blocks), dtype=blocks[0].dtype, device=blocks[0].device)
        return list(ones.unbind())
