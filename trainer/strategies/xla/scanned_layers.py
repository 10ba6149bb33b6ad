"""Layers as a loop of the compiled graph (JAX's `lax.scan`): 24 compile as fast as 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch.func import functional_call

from trainer.accelerators.xla import XlaAccelerator
from trainer.models import UsesKernel
from trainer.models.cache import Cache
from trainer.models.stack import Context, Hidden, ScanGroup, Stack
from trainer.strategies.xla.loops import Body, Loops


@dataclass(frozen=True)
class ScannedGroup:
    """Layers of a stack that run as a loop.

    Attributes:
        start, stop: their numbers.
        parameters: name in a layer -> the parameter stacked over layers: [stop - start, ...].
    """

    start: int
    stop: int
    parameters: Mapping[str, Tensor]


class ScannedLayers:
    """Runs the groups of a stack as loops; takes the place of `stack.one_by_one`.

    The last layer of the stack is left out of its loop where it computes some positions only.

    Args:
        groups: in ascending order; layers in none of them run one by one.
        split: says how stacked parameters are split over devices.
        accelerator: what records them.
        segments: whether attention without dropout takes segments in place of a mask.
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
        # The same body objects in every step, so that they are traced once.
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
        """As `Stack.run`, without a cache."""
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
        apart = positions is not None and group.stop == len(stack)
        count = group.stop - group.start - apart
        if count:
            keys = context.keys
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
        """Runs the first `count` layers of a group; `context.keys` are theirs."""
        like = hidden if isinstance(hidden, Tensor) else hidden[0]
        # What a loop carries must be floating point: masks become scores to add, and integers are
        # exact up to 2**24.
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
        partition = _keep_nothing if recomputed else default_partition
        carried, _ = self._loops.scan(
            self._body(layer, context, carried), carried, stacked, partition
        )
        out: Hidden = carried["hidden"]
        return out

    def _body(self, layer: nn.Module, context: Context, carried: Mapping[str, Any]) -> Body:
        dtypes = {name: column.dtype for name, column in context.columns.items()}
        key = (layer, layer.training, context.causal, context.sites, *carried, *dtypes.items())
        if key not in self._bodies:
            self._bodies[key] = _body(layer, context.causal, context.sites, dtypes)
        return self._bodies[key]


def scanned_groups(groups: Sequence[ScanGroup]) -> Iterator[ScanGroup]:
    """The groups whose layers can share stacked parameters: all are trained, or frozen, alike."""
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
    """What a round of the loop computes: a layer with parameters and dropout keys of its own."""

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
    """Whether attention probabilities are dropped, which fused kernels cannot do."""
    rates = [module.dropout for module in layer.modules() if isinstance(module, UsesKernel)]
    return context.keys is not None and any(rates)


def _keep_nothing(*arguments: Any, **settings: Any) -> Any:
    """Recomputes the activations of each round in the backward pass, from what goes into it."""
    with torch._functorch.config.patch(activation_memory_budget=0):
        return min_cut_rematerialization_partition(*arguments, **settings)


def _added(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask as scores to add."""
    if mask.is_floating_point():
        return mask
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return torch.zeros((), dtype=dtype, device=hidden.device).masked_fill(~mask, float("-inf"))
