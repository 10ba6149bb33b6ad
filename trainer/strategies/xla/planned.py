"""The memory of a step under XLA on TPUs, reproduced on the CPU.

Compared with libtpu's own buffers in docs/tpu.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.accelerators.kernels import without_autocast
from trainer.strategies.xla import flash


class XlaOperators(TorchFunctionMode):
    """Makes operators on tensors of the CPU keep the tensors that loops of layers keep on a TPU.

    - Layer norms keep their output before weight and bias, besides their input: torch-xla computes
      them by batch norm and a product.
    - The kernel of attention keeps heads of 64 numbers in vectors of 128. Without it, all scores.
    - Logits are computed at once, not in chunks, and stay in 16 bits: what the loss computes from
      them in fp32 is fused.

    Args:
        free: see `Config.planned_operators`.
        flash_from: shortest sequence whose attention is the kernel; None: never.
    """

    def __init__(
        self, free: Callable[[], AbstractContextManager[object]], flash_from: int | None
    ) -> None:
        super().__init__()
        self._free, self._flash_from = free, flash_from

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_xla.__get__:  # type: ignore[attr-defined]
            return True
        if func is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        # Without a graph of autograd, as in the loss, nothing keeps the copy.
        if func is Tensor.float and not torch.is_grad_enabled():
            with self._free():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        # A mask of numbers is a bias, which the kernel does not take.
        is_bias = attn_mask is not None and attn_mask.is_floating_point()
        shortest = self._flash_from
        if shortest is not None and not is_bias and flash.fits(query, key, shortest):
            # Heads of 64 are padded to 128, so they take twice the memory.
            width = query.shape[-1]
            query, key, value = (
                F.pad(each, (0, -width % flash.LANES)) for each in (query, key, value)
            )
            # Without the mask: the kernel has segments instead.
            out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            return out[..., :width]
        # In the precision of its inputs, as inside of PyTorch's operator.
        with without_autocast(query.device):
            scores = query @ key.transpose(-1, -2)
            if attn_mask is not None:
                scores = scores + attn_mask.to(query.dtype)
            return scores.softmax(-1) @ value


def _layer_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    out = F.layer_norm(x, shape, eps=eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias
