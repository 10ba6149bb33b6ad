"""Samples from a softmax on the device, as a pure function of a key per row."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.models.dropout import mix


@torch.no_grad()
def sample(logits: Tensor, key: Tensor, positions: Tensor) -> Tensor:
    """Draws a token from each softmax, by the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014).

    argmax(logits + g), with independent Gumbel noise g = -log(-log(u)), is distributed as the
    softmax. The noise is a hash of (key, position, token), so the choice depends neither on the
    batch nor on the device, except between tokens whose sums are equal to the last bits.

    Args:
        logits: [B, P, V].
        key: int32 [B].
        positions: int [B, P], the position of each softmax in its row.

    Returns:
        int64 [B, P].
    """
    vocabulary = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    place = mix(mix(positions.int()) ^ key[:, None])
    # Hashing token and place separately first makes their combinations independent.
    bits = mix(mix(vocabulary) ^ place[..., None])
    # 23 bits and a half: in fp32 u is never 0 or 1, where the noise would be infinite.
    u = (bits & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    noise = u.log_().neg_().log_().neg_()
    return noise.add_(logits.float()).argmax(-1)
