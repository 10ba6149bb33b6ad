"""Layers as a loop of the compiled graph (JAX's `lax.scan`): 24 layers compile as fast as 2.

The parameters of equal layers are stacked: with 12 layers, `attention.qkv.weight` [3w, w] becomes
one tensor [12, 3w, w]. One traced layer then runs 12 times, each time with another slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch.func import functional_call

from trainer.accelerators.kinds.xla import XlaAccelerator
from trainer.models import UsesKernel
from trainer.models.cache import Cache
from trainer.models.stack import Context, Hidden, ScanGroup, Stack
from trainer.strategies.xla.loops import Body, Loops


@dataclass(frozen=True)
class ScannedGroup:
    """Layers start ... stop - 1 of a stack, which run as a loop.

    Attributes:
        parameters: name in a layer -> the parameters of all layers, [stop - start, ...].
    """

    start: int
    stop: int
    parameters: Mapping[str, Tensor]


class ScannedLayers:
    """A runner (see `Stack.runner`) that runs groups of layers as loops.

    If only some positions of the last layer are needed, that layer runs outside the loop.

    Args:
        groups: in ascending order; all other layers run one by one.
        split: marks how stacked parameters are sharded over devices.
        accelerator: the XLA devices.
        segments: whether attention without dropout gets segments instead of a mask.
    """

    def __init__(
        self,
        groups: Sequence[ScannedGroup],
        split: Callable[[Tensor], Tensor],
        accelerator: XlaAccelerator,
        segments: bool,
    ) -> None:
        self._groups, self._split, self._segments = groups, split, segments
        self._loops = Loops(accelerator)
        # `Loops` traces a body once per object, so each kind of call keeps its body.
        self._bodies: dict[tuple[object, ...], Body] = {}

    def __call__(
        self,
        stack: Stack,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None,
        cache: Cache | None,
    ) -> Hidden:
        """Same as `Stack.run`, without a cache."""
        assert cache is None, "decoding does not run in a compiled loop"
        done = 0
        for group in self._groups:
            for index in range(done, group.start):
                own = stack.of_layer(context, index)
                hidden = stack[index](hidden, memory, bias, own)
            hidden = self._run(group, stack, hidden, memory, bias, context, positions)
            done = group.stop
        for index in range(done, len(stack)):
            hidden = stack[index](hidden, memory, bias, stack.of_layer(context, index, positions))
        return hidden

    def _run(
        self,
        group: ScannedGroup,
        stack: Stack,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None,
    ) -> Hidden:
        layer = stack[group.start]
        if self._segments and context.segments is not None and not _drops_attention(layer, context):
            context = replace(context, mask=context.segments.int())
        # All rounds of a loop have the same shapes. A layer that computes only the predicted
        # positions has another output shape, so it runs after the loop.
        apart = positions is not None and group.stop == len(stack)
        count = group.stop - group.start - apart
        if count:
            keys = context.keys
            # Each round gets the dropout key of its layer: the masks are those without a loop.
            own = replace(
                context, keys=None if keys is None else keys[group.start : group.start + count]
            )
            recomputed = stack.checkpointing and stack.training
            hidden = self._loop(
                layer, group.parameters, count, hidden, memory, bias, own, recomputed
            )
        if apart:
            last = {name: stacked[count] for name, stacked in group.parameters.items()}
            own = stack.of_layer(context, group.stop - 1, positions)
            hidden = functional_call(layer, last, (hidden, memory, bias, own), strict=True)
        return hidden

    def _loop(
        self,
        layer: nn.Module,
        parameters: Mapping[str, Tensor],
        count: int,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        recomputed: bool,
    ) -> Hidden:
        """Runs the first `count` layers of a group; `context.keys` has one key per layer."""
        like = hidden if isinstance(hidden, Tensor) else hidden[0]
        # A loop can carry only floating-point tensors. Boolean masks become scores to add (0 or
        # -inf). Segments and other integer columns become float32, which is exact up to 2**24.
        carried: dict[str, Any] = {"hidden": hidden}
        if context.mask is not None:
            is_segments = context.mask.dtype == torch.int32
            name = "segments" if is_segments else "mask"
            carried[name] = context.mask.float() if is_segments else _added(context.mask, like)
        if bias is not None:
            carried["bias"] = bias
        if memory is not None:
            carried["memory"] = memory
        if context.memory_mask is not None:
            carried["memory_mask"] = _added(context.memory_mask, like)
        for name, column in context.columns.items():
            carried[f"column.{name}"] = column if column.is_floating_point() else column.float()
        stacked: dict[str, Any] = {
            "parameters": {name: self._split(each[:count]) for name, each in parameters.items()}
        }
        if context.keys is not None:
            stacked["keys"] = context.keys
        # Activation checkpointing: only the inputs of each round are kept for the backward pass.
        partition = _keep_nothing if recomputed else default_partition
        carried, _ = self._loops.scan(
            self._body(layer, context, carried), carried, stacked, partition
        )
        out: Hidden = carried["hidden"]
        return out

    def _body(self, layer: nn.Module, context: Context, carried: Mapping[str, Any]) -> Body:
        dtypes = {name: column.dtype for name, column in context.columns.items()}
        # Everything that decides which operations the body has.
        key = (layer, layer.training, context.causal, context.sites, *carried, *dtypes.items())
        if key not in self._bodies:
            self._bodies[key] = _body(layer, context.causal, context.sites, dtypes)
        return self._bodies[key]


def scanned_groups(groups: Sequence[ScanGroup]) -> Iterator[ScanGroup]:
    """Yields the groups whose layers have equal shapes and train (or freeze) the same weights."""
    for group in groups:
        layers = [group.stack[index] for index in range(group.start, group.stop)]
        kinds = [
            [(name, each.shape, each.requires_grad) for name, each in layer.named_parameters()]
            for layer in layers
        ]
        if all(kind == kinds[0] for kind in kinds):
            yield group


def _body(
    layer: nn.Module, causal: bool, sites: tuple[str, ...], columns: Mapping[str, torch.dtype]
) -> Body:
    """The body of the loop: one layer, called with the parameters and dropout keys of round i."""

    def body(
        carried: Mapping[str, Any], stacked: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], None]:
        segments = carried.get("segments")
        context = Context(
            mask=carried.get("mask") if segments is None else segments.int(),
            causal=causal,
            sites=sites,
            keys=stacked.get("keys"),
            memory_mask=carried.get("memory_mask"),
            columns={name: carried[f"column.{name}"].to(dtype) for name, dtype in columns.items()},
        )
        tensors = (carried["hidden"], carried.get("memory"), carried.get("bias"))
        hidden = functional_call(
            layer, dict(stacked["parameters"]), (*tensors, context), strict=True
        )
        return {**carried, "hidden": hidden}, None

    return body


def _drops_attention(layer: nn.Module, context: Context) -> bool:
    """Whether attention probabilities get dropout, with which no kernel is called."""
    rates = [module.dropout for module in layer.modules() if isinstance(module, UsesKernel)]
    return context.keys is not None and any(rates)


def _keep_nothing(*arguments: Any, **settings: Any) -> Any:
    """A partition function that saves only the inputs of each round and recomputes the rest."""
    with torch._functorch.config.patch(activation_memory_budget=0):
        return min_cut_rematerialization_partition(*arguments, **settings)


def _added(mask: Tensor, hidden: Tensor) -> Tensor:
    """Turns a boolean mask into scores to add to attention's: 0 where True, else -inf."""
    if mask.is_floating_point():
        return mask
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return torch.zeros((), dtype=dtype, device=hidden.device).masked_fill(~mask, float("-inf"))
