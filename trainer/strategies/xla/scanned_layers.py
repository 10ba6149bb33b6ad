"""Layers as a loop of the compiled graph (JAX's `lax.scan`): the passes of 24 compile as fast as those of 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch._functorch.config
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch.func import functional_call

from trainer.accelerators.xla import XlaAccelerator
from trainer.strategies.xla.loops import Body, Loops

RunLayers: TypeAlias = Callable[..., Tensor]
"""As `trainer.models.layers.run_layers`."""


class Memory(Protocol):
    """The hidden states of an encoder, which layers of a decoder attend to."""

    @property
    def hidden(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor | None: ...


class ScannedLayers:
    """Runs equal layers as a loop; takes the place of `run_layers`.

    Where the last layer computes some cells only it is another one, and stays outside of the loop.

    Args:
        one_by_one: runs layers that are no stack.
        stacks: the parameters of all layers, by their names in a layer, by the first of the layers.
        split: says how stacked parameters are split over devices.
        accelerator: what records them.
        segments: whether attention without dropout takes segments in place of a mask.
    """

    def __init__(
        self,
        one_by_one: RunLayers,
        stacks: Mapping[nn.Module, Mapping[str, Tensor]],
        split: Callable[[Tensor], Tensor],
        accelerator: XlaAccelerator,
        segments: bool,
    ) -> None:
        self._one_by_one, self._stacks, self._split, self._segments = one_by_one, stacks, split, segments
        self._loops = Loops(accelerator)
        self._bodies: dict[tuple[object, ...], Body] = {}  # the same objects again, so that they are traced once

    def __call__(
        self,
        layers: nn.ModuleList,
        hidden: Tensor,
        mask: Tensor | None,
        dropout_keys: Tensor | Sequence[None],
        *,
        cells: Tensor | None = None,
        memory: Memory | None = None,
        checkpointing: bool = False,
        segments: Tensor | None = None,
    ) -> Tensor:
        """As `run_layers`, without a cache."""
        layer = layers[0]
        if layer not in self._stacks:
            return self._one_by_one(
                layers, hidden, mask, dropout_keys, cells=cells, memory=memory, checkpointing=checkpointing
            )
        if self._segments and segments is not None and not _drops_attention(layer, dropout_keys):
            mask = segments.int()
        count = len(layers) if cells is None else len(layers) - 1
        if count:
            keys = dropout_keys[:count] if isinstance(dropout_keys, Tensor) else None
            hidden = self._loop(layer, count, hidden, mask, keys, memory, checkpointing)
        if cells is None:
            return hidden
        last = {name: stack[count] for name, stack in self._stacks[layer].items()}
        out: Tensor = functional_call(layer, last, (hidden, mask, dropout_keys[count], cells, memory), strict=True)
        return out

    def _loop(
        self,
        layer: nn.Module,
        count: int,
        hidden: Tensor,
        mask: Tensor | None,
        keys: Tensor | None,
        memory: Memory | None,
        checkpointing: bool,
    ) -> Tensor:
        """Runs the first `count` layers of a stack."""
        carried = {"hidden": hidden}
        if mask is not None:
            carried |= {"segments": mask.float()} if mask.dtype == torch.int32 else {"mask": _added(mask, hidden)}
        if memory is not None:
            carried["memory"] = memory.hidden
            if memory.mask is not None:
                carried["memory_mask"] = _added(memory.mask, hidden)
        stacked: dict[str, Tensor | dict[str, Tensor]] = {
            "parameters": {name: self._split(stack[:count]) for name, stack in self._stacks[layer].items()}
        }
        if keys is not None:
            stacked["keys"] = keys
        partition = _keep_nothing if checkpointing else default_partition
        carried, _ = self._loops.scan(self._body(layer, memory), carried, stacked, partition)
        out: Tensor = carried["hidden"]
        return out

    def _body(self, layer: nn.Module, memory: Memory | None) -> Body:
        key = (layer, layer.training, type(memory))
        if key not in self._bodies:
            self._bodies[key] = _body(layer, type(memory))
        return self._bodies[key]


def equal_layers(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, tuple[str, ...]]]]:
    """Layers that can be a loop: the first of them, and by the name of each of its parameters those in all layers.

    A model that has them in a `ModuleList`, all alike, and runs them by its `run_layers`, lets them be one.
    """
    if not hasattr(model, "run_layers"):
        return
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        kinds = [
            [(name, each.shape, each.requires_grad) for name, each in layer.named_parameters()] for layer in layers
        ]
        if all(kind == kinds[0] for kind in kinds):
            yield layers[0], {name: tuple(f"{path}.{i}.{name}" for i in range(len(layers))) for name, *_ in kinds[0]}


def _body(layer: nn.Module, memory_type: type) -> Body:
    """What a round of the loop computes: a layer with parameters and dropout keys of its own."""

    def body(carried: Mapping[str, Tensor], stacked: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], None]:
        memory = memory_type(carried["memory"], carried.get("memory_mask")) if "memory" in carried else None
        mask = carried["segments"].int() if "segments" in carried else carried.get("mask")
        inputs = carried["hidden"], mask, stacked.get("keys"), None, memory
        hidden = functional_call(layer, dict(stacked["parameters"]), inputs, strict=True)
        return {**carried, "hidden": hidden}, None

    return body


def _drops_attention(layer: nn.Module, dropout_keys: Tensor | Sequence[None]) -> bool:
    """Whether it drops attention probabilities, which have to be written out for that."""
    rates = [getattr(module, "dropout", 0.0) for module in layer.modules() if hasattr(module, "kernel")]
    return isinstance(dropout_keys, Tensor) and any(rates)


def _keep_nothing(*arguments: object, **settings: object) -> object:
    """Has each round compute its activations again in the backward pass, from what goes into it."""
    with torch._functorch.config.patch(activation_memory_budget=0):
        return min_cut_rematerialization_partition(*arguments, **settings)


def _added(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask as scores to add: the loop carries floating-point numbers only."""
    if mask.is_floating_point():
        return mask
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return torch.zeros((), dtype=dtype, device=hidden.device).masked_fill(~mask, float("-inf"))
