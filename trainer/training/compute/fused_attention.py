"""Chooses between the accelerator's fused attention and the unfused one, which is the reference.

A kernel that is fast and wrong would spoil a run without a sign. So before the first step it is
compared with unfused attention on the device itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from trainer.accelerators import DTYPES, Accelerator, Precision
from trainer.checkpoint.collective import first_error, gather
from trainer.models import Model
from trainer.models.fused import FusedAttention
from trainer.models.layers.attention import Attention
from trainer.models.layers.dropout import attention_dropout

logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""The largest difference, as a part of the largest number of the same tensor."""
_TF32 = 5e-3  # the tolerance of fp32, where products round to TensorFloat-32


@dataclass(frozen=True)
class _Variant:
    """Arguments that select another kernel; see `FusedAttention`."""

    causal: bool = False
    prefix: bool = False
    window: int | None = None
    bias: bool = False
    crossed: bool = False
    even: bool = False


# An odd number of positions for blocks of a kernel, so that the last block is not full. Even
# lengths have other kernels, with blocks that need no mask.
_LENGTH, _OTHER_LENGTH, _EVEN_LENGTH = 150, 70, 512
_VARIANTS = (
    _Variant(causal=True, bias=True),
    _Variant(window=20),
    _Variant(causal=True, prefix=True),
    _Variant(crossed=True),
    _Variant(even=True),
)


def fuse_attention(
    model: Model, accelerator: Accelerator, precision: Precision, world_size: int = 1
) -> None:
    """Lets a model use the accelerator's kernel if it can and the kernel is right on all ranks.

    Collective.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    kernel, error, problem = _tested_kernel(modules, accelerator, DTYPES[precision])
    # A rank that decides otherwise would slow down all, and round differently.
    problem = first_error(problem, world_size)
    available = all(gather(kernel is not None, world_size))
    if problem is not None:
        logger.warning("attention    unfused: %s", problem)
    elif kernel is None or not available:
        return
    elif model.fuse_attention(kernel):
        logger.info("attention    fused, differs from unfused by %.1e", error)
    else:
        logger.info("attention    unfused, as this model has another kind of attention")


def _tested_kernel(
    modules: list[Attention], accelerator: Accelerator, dtype: torch.dtype
) -> tuple[FusedAttention | None, float, str | None]:
    """The kernel (None: there is none), its largest error, and what is wrong with it."""
    # Each head width and version of dropout is a kernel of its own.
    widths = sorted({module.inner // module.heads for module in modules})
    versions = sorted({module.dropout_version for module in modules})
    kernel: FusedAttention | None = None
    error = 0.0
    try:
        for width, version in product(widths, versions):
            # All or none: a model that is fused in part would not be worth its other rounding.
            if (kernel := accelerator.fused_attention(width, dtype)) is None:
                return None, error, None
            found = largest_error(kernel, width, accelerator.device, dtype, version)
            error = max(error, found)
    except Exception as cause:  # a compiler can fail in many ways; the run needs no kernel
        return kernel, error, f"the kernel does not run here: {cause}"
    has_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if error > (_TF32 if has_tf32 else _TOLERANCES[dtype]):
        return kernel, error, f"the kernel's results differ by {error:.1e}"
    return kernel, error, None


def largest_error(
    kernel: FusedAttention, width: int, device: torch.device, dtype: torch.dtype, version: int = 2
) -> float:
    """The largest difference between fused and unfused attention on small inputs.

    Results and gradients, of two rows with packed sequences and dropout.

    Args:
        version: of dropout.

    Returns:
        As a part of the largest number of the tensor in which it was found.
    """
    errors = [
        error
        for variant in _VARIANTS
        for error in _errors(variant, kernel, width, device, dtype, version)
    ]
    # `max` may hide NaN, which compares with nothing.
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _errors(
    variant: _Variant,
    kernel: FusedAttention,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    version: int,
) -> list[float]:
    batch, heads, keys = 2, 2, _EVEN_LENGTH if variant.even else _LENGTH
    queries = _OTHER_LENGTH if variant.crossed else keys
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    gradient = random(batch, heads, queries, width)
    inputs = [random(batch, heads, length, width) for length in (queries, keys, keys)]
    if variant.bias:
        inputs.append(random(heads, queries + keys - 1))
    segments, key_segments = (_segments(batch, length).to(device) for length in (queries, keys))
    prefix = (torch.arange(keys, device=device) % 60 < 9).expand(batch, -1)
    # Keys use all 32 bits, so some are negative.
    dropout_keys = torch.tensor([7, -5], dtype=torch.int32, device=device)

    def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel(
            query,
            key,
            value,
            segments=segments,
            key_segments=key_segments,
            causal=variant.causal,
            prefix=prefix if variant.prefix else None,
            window=variant.window,
            bias=bias,
            scale=width**-0.5,
            dropout=0.1,
            dropout_key=dropout_keys,
            dropout_version=version,
        )

    row = torch.arange(queries, device=device)[:, None]
    column = torch.arange(keys, device=device)
    allowed = segments[:, None, :, None] == key_segments[:, None, None, :]
    if variant.causal:
        seen = column <= row
        allowed = allowed & (seen | prefix[:, None, None] if variant.prefix else seen)
    if variant.window is not None:
        allowed = allowed & ((column - row).abs() <= variant.window)

    def unfused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = width**-0.5 * query @ key.mT
        if bias is not None:
            # A bias for each distance column - row, from -(queries - 1) on.
            scores = scores + bias[:, column - row + queries - 1]
        probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return attention_dropout(probabilities, 0.1, dropout_keys, version) @ value

    found = _with_gradients(fused, inputs, gradient)
    # The reference is computed in fp32 from the same numbers.
    expected = _with_gradients(unfused, [each.float() for each in inputs], gradient.float())
    return [
        float((mine.float() - right).abs().max() / right.abs().max())
        for mine, right in zip(found, expected, strict=True)
    ]


def _segments(batch: int, length: int) -> Tensor:
    """Packed sequences: the first row has two, the second one and padding."""
    segments = torch.ones(batch, length, dtype=torch.int32)
    segments[0, length // 3 :] = 2
    # Padding is segment 0, and attends to itself: a row without any position would be NaN.
    segments[1, length - 10 :] = 0
    return segments


def _with_gradients(
    attend: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))
