"""Attention by JAX's Pallas kernel for TPUs: blocks of scores stay on the chip (Dao et al.

2022, "FlashAttention").

The kernel is compiled by XLA with the rest of a graph, which needs its computation only. So JAX,
which comes with `torch-xla[pallas]`, is asked for nothing but that, and never sees the chips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.accelerators import version_of
from trainer.accelerators.xla import XlaAccelerator
from trainer.errors import SamestepError
from trainer.strategies.xla.split import Axis, mesh_of

if TYPE_CHECKING:
    import jax

_PLATFORM = "tpu"
_BLOCKS = (512, 384, 256, 128)  # cells; the kernel knows multiples of 128 only
_LANES = 128  # of a chip's vectors; the kernel knows heads that fit into them or fill them


def usable(accelerator: XlaAccelerator) -> bool:
    """Whether the devices can run the kernel, and there is a JAX to make it."""
    return accelerator.platform == "tpu" and version_of("jax") is not None


class FlashAttention:
    """Takes the place of `scaled_dot_product_attention`.

    Where the kernel does not fit, that computes.

    Args:
        mesh: the number of the mesh whose devices examples are split over.
        shortest: cells from which on the kernel is used.
    """

    def __init__(self, mesh: int, shortest: int) -> None:
        self._mesh, self._shortest = mesh, shortest

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """[B, H, S, K] each -> [B, H, S, K].

        attn_mask: int [B, S], a cell attends to the cells of the same number; or as the function
            that it replaces takes it.
        """
        segments = attn_mask if attn_mask is not None and attn_mask.dtype == torch.int32 else None
        (_, _, cells, width), alike = (
            query.shape,
            query.shape == key.shape and query.dtype == torch.bfloat16,
        )
        fits = (
            cells >= self._shortest
            and cells % _BLOCKS[-1] == 0
            and (width < _LANES or width % _LANES == 0)
        )
        if alike and fits and attn_mask is segments:
            factor = width**-0.5 if scale is None else scale
            call = _Call(tuple(query.shape), segments is not None, is_causal, factor, self._mesh)
            return _operation()(query, key, value, segments, _register(call))[0]
        if segments is not None:
            attn_mask = segments[:, None, :, None] == segments[:, None, None, :]
            attn_mask, is_causal = attn_mask.tril() if is_causal else attn_mask, False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )


class _Call(NamedTuple):
    """What decides which computation a call of the kernel is.

    Attributes:
        shape: of the queries [B, H, S, K], and of keys and values.
        packed: whether there are segments.
        causal: whether cells attend to those before them only.
        scale: of the scores.
        mesh: the number of a mesh whose devices have B / number of them examples each.
    """

    shape: tuple[int, ...]
    packed: bool
    causal: bool
    scale: float
    mesh: int


_CALLS: list[_Call] = []  # operations take numbers


def _register(call: _Call) -> int:
    if call not in _CALLS:
        _CALLS.append(call)
    return _CALLS.index(call)


class _Kernel(NamedTuple):
    """Both passes as computations of XLA, for the examples of one device.

    Attributes:
        forward: (query, key, value[, segments]) -> (out, *residuals).
        backward: (*residuals, gradient) -> gradients of query, key and value.
        results: shapes and types of out and residuals, of all devices.
    """

    forward: object
    backward: object
    results: list[tuple[tuple[int, ...], torch.dtype]]


@cache
def _kernel(number: int) -> _Kernel:
    """Has JAX write the kernel out.

    Raises:
        SamestepError: it cannot.
    """
    call = _CALLS[number]
    try:
        return _written(call)
    except Exception as error:
        raise SamestepError(
            f"JAX {version_of('jax')} cannot write out attention for {list(call.shape)}: {error}; "
            "set "
            "strategy.flash_attention_from=null to do without its kernel"
        ) from error


def _written(call: _Call) -> _Kernel:
    import jax
    from jax._src import cloud_tpu_init

    jax.config.update("jax_platforms", "cpu")  # it must not take the chips
    cloud_tpu_init.running_in_cloud_tpu_vm = (
        False  # nor ask them for the version of a libtpu, which it has not loaded
    )
    devices = mesh_of(call.mesh).size()
    examples, (_, heads, cells, width) = call.shape[0] // devices, call.shape
    inputs = [jax.ShapeDtypeStruct((examples, heads, cells, width), "bfloat16")] * 3
    if call.packed:
        inputs.append(jax.ShapeDtypeStruct((examples, cells), "int32"))
    structure: list[jax.tree_util.PyTreeDef] = []

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(partial(_attention, call, segments), query, key, value)
        residuals, tree = jax.tree.flatten(pullback)
        structure[:] = [tree]
        return out, *residuals

    def backward(*tensors: jax.Array) -> tuple[jax.Array, ...]:
        gradients: tuple[jax.Array, ...] = jax.tree.unflatten(structure[0], tensors[:-1])(
            tensors[-1]
        )
        return gradients

    results = jax.eval_shape(forward, *inputs)
    assert all(each.shape[0] == examples for each in results), (
        f"not all of {results} are of {examples} examples"
    )
    return _Kernel(
        _computation(forward, inputs),
        _computation(backward, [*results[1:], results[0]]),
        [
            ((each.shape[0] * devices, *each.shape[1:]), getattr(torch, each.dtype.name))
            for each in results
        ],
    )


def _attention(
    call: _Call, segments: jax.Array | None, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    block = next(size for size in _BLOCKS if call.shape[2] % size == 0)
    names = [field.name for field in fields(pallas.BlockSizes) if field.name != "block_b"]
    return pallas.flash_attention(
        query,
        key,
        value,
        segment_ids=None if segments is None else pallas.SegmentIds(segments, segments),
        causal=call.causal,
        sm_scale=call.scale,
        block_sizes=pallas.BlockSizes(block_b=1, **dict.fromkeys(names, block)),
    )


def _computation(function: Callable[..., object], inputs: Sequence[jax.ShapeDtypeStruct]) -> object:
    import jax
    from torch_xla.core.xla_builder import computation_from_module_proto

    lowered = (
        jax.jit(function, keep_unused=True).trace(*inputs).lower(lowering_platforms=(_PLATFORM,))
    )
    return computation_from_module_proto(
        "attention", lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    )


def _run(
    computation: object, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], mesh: int
) -> list[Tensor]:
    """Has each device compute with its examples; XLA itself could not split the kernel.

    Args:
        computation: for the examples of a device.
        tensors: of all devices' examples.
        shapes: of what comes out, likewise.
        mesh: the number of the mesh.
    """
    from torch_xla import _XLAC
    from torch_xla.distributed.spmd import disable_manual_sharding, enable_manual_sharding

    devices = mesh_of(mesh)

    def axes(tensor: Tensor) -> tuple[Axis, ...]:
        return (("replicate", "shard"), *[None] * (tensor.ndim - 1))

    local = [
        enable_manual_sharding(each.clone(), axes(each), mesh=devices).global_tensor
        for each in tensors
    ]
    found = _XLAC._xla_user_computation("xla::attention", local, computation)
    return [
        disable_manual_sharding(each, axes(each), shape, mesh=devices).global_tensor
        for each, shape in zip(found, shapes, strict=True)
    ]


class _Context(Protocol):
    """What is kept for the backward pass."""

    call: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@cache
def _operation() -> Callable[[Tensor, Tensor, Tensor, Tensor | None, int], list[Tensor]]:
    """The operation as torch knows it, so that AOTAutograd may record it."""

    @torch.library.custom_op("samestep::flash_attention", mutates_args=())
    def attention(
        query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, call: int
    ) -> list[Tensor]:
        tensors = [query, key, value, *([] if segments is None else [segments])]
        return _run(
            _kernel(call).forward,
            tensors,
            [shape for shape, _ in _kernel(call).results],
            _CALLS[call].mesh,
        )

    @attention.register_fake
    def _(
        query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, call: int
    ) -> list[Tensor]:
        return [query.new_empty(shape, dtype=dtype) for shape, dtype in _kernel(call).results]

    @torch.library.custom_op("samestep::flash_attention_backward", mutates_args=())
    def gradients(residuals: list[Tensor], gradient: Tensor, call: int) -> list[Tensor]:
        return _run(
            _kernel(call).backward, [*residuals, gradient], [gradient.shape] * 3, _CALLS[call].mesh
        )

    @gradients.register_fake
    def _(residuals: list[Tensor], gradient: Tensor, call: int) -> list[Tensor]:
        return [torch.empty_like(gradient) for _ in range(3)]

    def keep(
        ctx: _Context,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, int],
        output: list[Tensor],
    ) -> None:
        ctx.call = inputs[-1]
        ctx.save_for_backward(*output[1:])

    def backward(ctx: _Context, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        return (*gradients(list(ctx.saved_tensors), grads[0].contiguous(), ctx.call), None, None)

    attention.register_autograd(backward, setup_context=keep)
    return attention
