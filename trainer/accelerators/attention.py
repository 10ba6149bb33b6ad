"""The memory of attention on a GPU, reproduced with PyTorch's fake tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GpuAttention(TorchFunctionMode):
    """Makes attention on fake CPU tensors save the tensors that the kernels of GPUs save.

    Without a mask, the CPU's kernel saves the same tensors as FlashAttention. With a mask, GPUs use
    the memory-efficient kernel, whose bias has a number for each score; the CPU falls back to
    unfused attention if the bias needs a gradient.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The model asks `is_cpu` whether attention with a trained bias is fused: as on a GPU.
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
