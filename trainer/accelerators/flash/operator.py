"""Fused attention with segments, relative bias and dropout, as custom operators of PyTorch.

The operators are opaque to torch.compile and to autograd: the fake implementations tell it shapes
and strides, and `samestep::attention_backward` computes the gradients. The module `launch` is
imported at the first call, because Triton is an optional dependency.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WIDTHS = (32, 64, 80, 96, 128)
"""Head widths that the kernels have block sizes for."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_WINDOW = -1
_BIAS = 6
"""The place of the bias among the arguments of the operator."""


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take heads of a width, in a precision."""
    return width in WIDTHS and dtype in _DTYPES


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention` can take these tensors: their device, precision and head width."""
    if not fits(query.shape[-1], query.dtype):
        return False
    alike = query.dtype == key.dtype == value.dtype and query.device == key.device == value.device
    return alike and key.shape == value.shape and _has_device(query.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_device(device: torch.device) -> bool:
    # Dynamo takes the result as a constant, because it cannot trace what the function asks.
    return _compiles_for(device)


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if device.type == "cpu":
        from triton import knobs

        return bool(knobs.runtime.interpret)
    # Older GPUs have no bf16 and no asynchronous copies. AMD's capabilities begin at 9.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    causal: bool = False,
    prefix: Tensor | None = None,
    window: int | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_key: Tensor | None = None,
    dropout_version: int = 2,
) -> Tensor:
    """Multi-head attention without a matrix of scores: [B, H, T, K] -> [B, H, T, K].

    All restrictions combine. A query that may attend to nothing gets zeros, where a softmax would
    give NaN. The result is stored as [B, T, H, K], so that `.transpose(1, 2).flatten(2)` is free.

    Args:
        query: [B, H, T, K].
        key, value: [B, H, S, K].
        segments: int [B, T]; a query attends to keys of its segment. None: to all.
        key_segments: int [B, S]; None: `segments`.
        causal: forbids keys after the query; query 0 is aligned with key 0.
        prefix: bool [B, S], keys that `causal` does not forbid.
        window: forbids keys more than `window` positions before or after the query.
        bias: [H, T + S - 1], added to the scores by distance: entry j - i + T - 1 to query i and
            key j. Fp16, bf16 or fp32; it gets a gradient.
        scale: of the products; None: K ** -0.5.
        dropout: probability of dropping; needs `dropout_key`.
        dropout_key: int32 [B]. None: no dropout.
        dropout_version: 1: masks of `models.dropout.dropout`; 2: of `attention_dropout`.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    if prefix is not None and not causal:
        prefix = None
    if segments is not None and key_segments is None:
        if queries != keys:
            raise ValueError(
                f"segments are given for {queries} queries, but not for the {keys} keys. Pass "
                "key_segments."
            )
        key_segments = segments
    if (segments is None) != (key_segments is None):
        raise ValueError("key_segments is given without segments. Pass both.")
    _check_shape("segments", segments, (batch, queries))
    _check_shape("key_segments", key_segments, (batch, keys))
    _check_shape("prefix", prefix, (batch, keys))
    _check_shape("bias", bias, (heads, queries + keys - 1))
    _check_shape("dropout_key", dropout_key, (batch,))
    if dropout == 0:
        dropout_key = None
    out, _ = torch.ops.samestep.attention(
        _dense_rows(query),
        _dense_rows(key),
        _dense_rows(value),
        None if segments is None else segments.to(torch.int32).contiguous(),
        None if key_segments is None else key_segments.to(torch.int32).contiguous(),
        None if prefix is None else prefix.to(torch.int8).contiguous(),
        None if bias is None else bias.contiguous(),
        None if dropout_key is None else dropout_key.to(torch.int32).contiguous(),
        causal,
        _NO_WINDOW if window is None else window,
        width**-0.5 if scale is None else scale,
        dropout,
        dropout_version,
    )
    result: Tensor = out
    return result


def _check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}. Give it {list(expected)}.")


def _dense_rows(x: Tensor) -> Tensor:
    """Features next to each other in memory; the other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_position(x: Tensor) -> Tensor:
    """An uninitialized tensor like x, [B, H, T, K], stored as [B, T, H, K]."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


@torch.library.custom_op("samestep::attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    key_segments: Tensor | None,
    prefix: Tensor | None,
    bias: Tensor | None,
    dropout_key: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    dropout_version: int,
) -> tuple[Tensor, Tensor]:
    """Returns the result and the logarithm of the softmax's denominators, fp32 [B, H, T]."""
    from trainer.accelerators.flash import launch

    out = _by_position(query)
    normalizer = query.new_empty(query.shape[:3], dtype=torch.float32)
    masks = (segments, key_segments, prefix)
    of_dropout = (dropout, dropout_version)
    call = launch.Call(
        query, key, value, *masks, bias, dropout_key, causal, window, scale, *of_dropout
    )
    call.forward(out, normalizer)
    return out, normalizer


@_forward.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _by_position(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("samestep::attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    normalizer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    key_segments: Tensor | None,
    prefix: Tensor | None,
    bias: Tensor | None,
    dropout_key: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    dropout: float,
    dropout_version: int,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and bias; the last is empty unless `with_bias`."""
    from trainer.accelerators.flash import launch

    gradients = _gradients(query, key, value, bias, with_bias)
    masks = (segments, key_segments, prefix)
    of_dropout = (dropout, dropout_version)
    call = launch.Call(
        query, key, value, *masks, bias, dropout_key, causal, window, scale, *of_dropout
    )
    call.backward(grad, out, normalizer, *gradients)
    return gradients


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # grad, out and normalizer, then the forward pass's arguments.
    query, key, value = arguments[3:6]
    return _gradients(query, key, value, arguments[3 + _BIAS], with_bias=arguments[-1])


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = query.new_empty(0)
    bias_grad = torch.empty_like(bias) if bias is not None and with_bias else none
    return _by_position(query), _by_position(key), _by_position(value), bias_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:8], inputs[8:]
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    with_bias = ctx.needs_input_grad[_BIAS]
    *gradients, bias_grad = torch.ops.samestep.attention_backward(
        _dense_rows(grad), *ctx.saved_tensors, *ctx.settings, with_bias
    )
    return *gradients, None, None, None, bias_grad if with_bias else None, *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)
