"""The memory of attention on a GPU, reproduced on PyTorch's fake tensors, which are on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GpuAttention(TorchFunctionMode):
    """Makes attention keep what the kernels of GPUs keep, although fake tensors are on the CPU,
    which they deny.

    Without a mask the CPU's kernel keeps what FlashAttention does. With one, GPUs take the
    memory-efficient kernel, whose bias has an element for each score of a row, and the CPU falls
    back to writing scores out if the bias has a gradient.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        if func is not F.scaled_dot_product_attention or kwargs.get("attn_mask") is None:
            return func(*args, **kwargs)
        query, key, value = args
        mask: Tensor = kwargs["attn_mask"]
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        bias = mask.to(query.dtype).expand(*query.shape[:-1], key.shape[2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, bias, True, scale=kwargs["scale"])[0]
