"""Attention by JAX's Pallas kernel for TPUs (Dao et al. 2022, "FlashAttention").

JAX (of `torch-xla[pallas]`) only lowers the kernel to an XLA computation. XLA compiles it with the
rest of the graph, so JAX never uses the chips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import SamestepError
from trainer.accelerators import version_of
from trainer.accelerators.kinds.xla import XlaAccelerator
from trainer.strategies.xla.split import Axis, mesh_of

if TYPE_CHECKING:
    import jax

_PLATFORM = "tpu"
_BLOCKS = (512, 384, 256, 128)  # positions; the kernel supports only multiples of 128
LANES = 128  # per vector of a chip; a head must be narrower, or a multiple


def usable(accelerator: XlaAccelerator) -> bool:
    """Whether the devices can run the kernel, and JAX is installed to build it."""
    return accelerator.platform == "tpu" and version_of("jax") is not None


def fits(query: Tensor, key: Tensor, shortest: int) -> bool:
    """Whether the kernel supports these inputs, [B, H, S, K], of at least `shortest` positions."""
    length, width = query.shape[2:]
    return (
        query.shape == key.shape
        and query.dtype == torch.bfloat16
        and length >= shortest
        and length % _BLOCKS[-1] == 0
        and (width < LANES or width % LANES == 0)
    )


class FlashAttention:
    """Replaces `scaled_dot_product_attention`; falls back to it for unsupported inputs.

    Args:
        mesh: number of the mesh over whose devices examples are sharded.
        shortest: minimum sequence length for the kernel.
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

        Args:
            attn_mask: int [B, S]: attention stays within equal numbers; or a mask as in the
                replaced function.
        """
        segments = attn_mask if attn_mask is not None and attn_mask.dtype == torch.int32 else None
        # A mask that is no segments, such as a bias, is left to XLA.
        if attn_mask is segments and fits(query, key, self._shortest):
            width = query.shape[-1]
            factor = width**-0.5 if scale is None else scale
            call = _Call(tuple(query.shape), segments is not None, is_causal, factor, self._mesh)
            return _operation()(query, key, value, segments, _register(call))[0]
        if segments is not None:
            # PyTorch takes a mask or is_causal, so both become one mask.
            attn_mask = segments[:, None, :, None] == segments[:, None, None, :]
            attn_mask, is_causal = attn_mask.tril() if is_causal else attn_mask, False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )


class _Call(NamedTuple):
    """The static arguments of a call, which select a compiled kernel.

    Attributes:
        shape: of queries, keys and values, [B, H, S, K].
        packed: whether there are segments.
        causal: whether positions attend only to earlier ones.
        scale: of the scores.
        mesh: number of a mesh; its devices share the B examples equally.
    """

    shape: tuple[int, ...]
    packed: bool
    causal: bool
    scale: float
    mesh: int


_CALLS: list[_Call] = []  # torch operations take numbers, so a call is an index in this list


def _register(call: _Call) -> int:
    if call not in _CALLS:
        _CALLS.append(call)
    return _CALLS.index(call)


class _Kernel(NamedTuple):
    """Both passes as XLA computations for the examples of one device.

    Attributes:
        forward: (query, key, value[, segments]) -> (out, *residuals).
        backward: (*residuals, gradient) -> gradients of query, key and value.
        results: shapes and dtypes of out and residuals, over all devices.
    """

    forward: object
    backward: object
    results: list[tuple[tuple[int, ...], torch.dtype]]


@cache
def _kernel(number: int) -> _Kernel:
    """Lowers the kernel with JAX.

    Raises:
        SamestepError: JAX fails.
    """
    call = _CALLS[number]
    try:
        return _lowered(call)
    except Exception as error:
        raise SamestepError(
            f"JAX {version_of('jax')} cannot lower attention for {list(call.shape)}: {error}. Set "
            "strategy.flash_attention_from=null to use unfused attention."
        ) from error


def _lowered(call: _Call) -> _Kernel:
    import jax
    from jax._src import cloud_tpu_init

    # JAX only lowers the kernel here. It must not take the chips, nor ask a libtpu that it has not
    # loaded for its version.
    jax.config.update("jax_platforms", "cpu")
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    devices = mesh_of(call.mesh).size()
    batch, heads, length, width = call.shape
    examples = batch // devices
    inputs = [jax.ShapeDtypeStruct((examples, heads, length, width), "bfloat16")] * 3
    if call.packed:
        inputs.append(jax.ShapeDtypeStruct((examples, length), "int32"))
    structure: list[jax.tree_util.PyTreeDef] = []

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(partial(_attention, call, segments), query, key, value)
        # Between the passes, torch keeps the residuals as plain tensors.
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

    # The largest block that divides the sequence: fewer steps of the kernel's grid.
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
    from jax import export
    from jax._src.lib import xla_client
    from torch_xla.core.xla_builder import computation_from_module_proto

    # Exported code is in a version of the kernel's language that older compilers read: libtpu may
    # be some months older than JAX. Lowered without an export, it is in JAX's newest version.
    exported = export.export(jax.jit(function, keep_unused=True), platforms=(_PLATFORM,))
    hlo = xla_client._xla.mlir.mlir_module_to_xla_computation(
        exported(*inputs).mlir_module(), use_tuple_args=False, return_tuple=False
    )
    return computation_from_module_proto("attention", hlo.as_serialized_hlo_module_proto())


def _run(
    computation: object, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], mesh: int
) -> list[Tensor]:
    """Runs a computation on each device with that device's examples.

    XLA cannot shard the kernel by itself: inside "manual sharding" it sees one device's shapes.

    Args:
        computation: for the examples of one device.
        tensors: with the examples of all devices.
        shapes: of the results, for all devices.
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
    """Values that the forward pass saves for the backward pass."""

    call: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


@cache
def _operation() -> Callable[[Tensor, Tensor, Tensor, Tensor | None, int], list[Tensor]]:
    """Registers the kernel as a torch operation, which AOTAutograd can trace."""

    @torch.library.custom_op("samestep::flash_attention", mutates_args=())
    def attention(
        query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, call: int
    ) -> list[Tensor]:
        # The computation has as many inputs as the call that it was lowered for.
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
        # None for segments and the number of the call, which have no gradient.
        return (*gradients(list(ctx.saved_tensors), grads[0].contiguous(), ctx.call), None, None)

    attention.register_autograd(backward, setup_context=keep)
    return attention
