"""Chooses between the accelerator's fused attention and the unfused one, which is the reference.

A kernel that is fast and wrong would spoil a run without a sign. So before the first step it is
compared with unfused attention on the device itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.accelerators import DTYPES, Accelerator, Precision
from trainer.models import Model
from trainer.models.attention import Attention, segment_mask
from trainer.models.dropout import dropout
from trainer.models.fused import FusedAttention

logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""The largest difference, as a part of the largest number of the same tensor."""


def fuse_attention(model: Model, accelerator: Accelerator, precision: Precision) -> None:
    """Lets a model use the accelerator's kernel if both can and the kernel is right."""
    kernel = accelerator.fused_attention()
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    if kernel is None or not modules:
        return
    width, dtype = modules[0].inner // modules[0].heads, DTYPES[precision]
    try:
        error = largest_error(kernel, width, accelerator.device, dtype)
    except Exception as cause:  # a compiler can fail in many ways; the run needs no kernel
        logger.warning("attention    unfused: the kernel does not run here: %s", cause)
        return
    if error > _TOLERANCES[dtype]:
        logger.warning("attention    unfused: the kernel differs from it by %.1e", error)
    elif model.fuse_attention(kernel):
        logger.info("attention    fused, differs from unfused by %.1e", error)
    else:
        logger.info("attention    unfused: this model's needs scores of its own")


def largest_error(
    kernel: FusedAttention, width: int, device: torch.device, dtype: torch.dtype
) -> float:
    """The largest difference between fused and unfused attention, with gradients, on small inputs.

    Two rows of 150 positions, an odd number for blocks of a kernel: packed sequences, later
    positions masked, a bias by distance and dropout.

    Returns:
        As a part of the largest number of the tensor in which it was found.
    """
    batch, heads, length = 2, 2, 150
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv = [random(batch, heads, length, width) for _ in range(3)]
    bias, gradient = random(heads, 2 * length - 1), random(batch, heads, length, width)
    segments = torch.ones(batch, length, dtype=torch.int32)
    segments[0, 60:], segments[1, 140:] = 2, 0
    segments = segments.to(device)
    keys = torch.tensor([7, -5], dtype=torch.int32, device=device)

    def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return kernel(
            query,
            key,
            value,
            segments=segments,
            key_segments=segments,
            causal=True,
            prefix=None,
            window=None,
            bias=bias,
            scale=width**-0.5,
            dropout=0.1,
            dropout_key=keys,
        )

    def unfused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        place = torch.arange(length, device=device)
        distance = bias[:, place - place[:, None] + length - 1]
        scores = width**-0.5 * query @ key.mT + distance
        scores = scores.masked_fill(~segment_mask(segments, causal=True), float("-inf"))
        return dropout(scores.softmax(-1), 0.1, keys) @ value

    found = _with_gradients(fused, [*qkv, bias], gradient)
    # The reference is computed in fp32 from the same numbers.
    expected = _with_gradients(unfused, [each.float() for each in (*qkv, bias)], gradient.float())
    errors = [
        float((mine.float() - right).abs().max() / right.abs().max())
        for mine, right in zip(found, expected, strict=True)
    ]
    # `max` may hide NaN, which compares with nothing.
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _with_gradients(
    attend: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))
