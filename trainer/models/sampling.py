"""Random numbers on the device, as a pure function of a key per row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.models.layers.dropout import mix


@torch.no_grad()
def sample(logits: Tensor, key: Tensor, positions: Tensor) -> Tensor:
    """Samples a token from each softmax by Gumbel-max (Gumbel 1954; Maddison et al. 2014).

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
    noise = gumbel(key, positions, logits.shape[-1])
    return noise.add_(logits.float()).argmax(-1)


def gumbel(key: Tensor, positions: Tensor, count: int) -> Tensor:
    """Gumbel noise for `count` tokens at each position: int [B, P] -> float32 [B, P, count]."""
    vocabulary = torch.arange(count, dtype=torch.int32, device=key.device)
    place = mix(mix(positions.int()) ^ key[:, None])
    # Hashing token and place separately first makes their combinations independent.
    u = _uniform(mix(mix(vocabulary) ^ place[..., None]))
    return u.log_().neg_().log_().neg_()


@torch.no_grad()
def normal(key: Tensor, shape: tuple[int, ...], std: float) -> Tensor:
    """Normally distributed numbers, truncated at two standard deviations: float32 [B, *shape].

    Args:
        key: int32 [B].
    """
    place = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device)
    u = _uniform(mix(mix(place) ^ mix(key)[:, None]))
    inside = math.erf(math.sqrt(2))
    noise = torch.erfinv(u.mul_(2).sub_(1).mul_(inside)).mul_(math.sqrt(2) * std)
    return noise.view(len(key), *shape)


def _uniform(bits: Tensor) -> Tensor:
    # 23 bits and a half: in fp32 never 0 or 1, where a Gumbel or normal number would be infinite.
    return (bits & 0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
