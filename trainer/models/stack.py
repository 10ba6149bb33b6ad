"""Stacks of layers, and the context that layers get besides their hidden states."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.models.fused import Mask

if TYPE_CHECKING:
    from trainer.models.cache import Cache, LayerCache

Hidden = TypeVar("Hidden", bound=Tensor | tuple[Tensor, ...])
"""The hidden states between layers: [B, S, D], or a (named) tuple of such tensors."""


@dataclass(frozen=True)
class Context:
    """Whatever a layer needs besides its differentiable tensors.

    Differentiable tensors are separate arguments because strategies' hooks search tuples and
    dictionaries for tensors, but not objects.

    Attributes:
        mask: of self-attention: bool, True where attention is allowed; broadcasts to
            [B, H, S, S]. None: nothing is masked, or with `causal` later positions. In XLA's loop
            over layers, scores to add; for a kernel that takes them, int32 segments [B, S].
        causal: whether positions attend only to earlier ones. A four-dimensional `mask` already
            contains that.
        segments: int [B, S], if they and `causal` are equivalent to `mask`, for kernels that take
            segments.
        sites: names of the places where a layer applies dropout, in the order of `keys`.
        keys: int32 [sites, B], a random key per site and row; None: no dropout.
        positions: int [B, P], the only positions that the layer must compute; None: all.
        memory_mask: like `mask`, for cross-attention.
        fused, fused_memory: the masks of self-attention and cross-attention for a fused kernel,
            which then computes attention; `mask` and `memory_mask` are None.
        cache: keys and values of earlier positions.
        columns: the columns of `Inputs.extra` that the layers read.
        scores: a list to which the layer appends its attention scores, [B, H, S, S], minus infinity
            where attention is not allowed; None: they are not kept.
    """

    mask: Tensor | None = None
    causal: bool = False
    segments: Tensor | None = None
    sites: tuple[str, ...] = ()
    keys: Tensor | None = None
    positions: Tensor | None = None
    memory_mask: Tensor | None = None
    fused: Mask | None = None
    fused_memory: Mask | None = None
    cache: LayerCache | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    scores: list[Tensor] | None = None

    def key(self, site: str) -> Tensor | None:
        """The dropout keys of a site, int32 [B]; None: no dropout there."""
        # A family without dropout at a site simply does not list it.
        if self.keys is None or site not in self.sites:
            return None
        return self.keys[self.sites.index(site)]


class LayerPlace(NamedTuple):
    """The layer of a parameter.

    Attributes:
        stack: name of the stack.
        number: index of the layer in the stack.
        depth: number of layers in the stack.
        rest: name of the parameter inside the layer.
    """

    stack: str
    number: int
    depth: int
    rest: str

    def at(self, number: int) -> str:
        """The name of the same parameter in layer `number`."""
        return f"{self.stack}.{number}.{self.rest}"


class Runner(Protocol):
    """Runs the layers of a stack; arguments as for `Stack.run`."""

    def __call__(
        self,
        stack: Stack,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None,
        cache: Cache | None,
    ) -> Hidden: ...


class Stack(nn.ModuleList):
    """A sequence of layers.

    A layer is called as layer(hidden, memory, bias, context) and returns hidden states of the
    same structure. Its attribute `static` is hashable; layers with equal values compute the same
    function of their parameters and inputs.

    Attributes:
        runner: a strategy's, which runs the layers; None: they are called in order.
        checkpointing: whether layers recompute their activations in the backward pass.
    """

    def __init__(self, layers: Sequence[nn.Module] | Iterator[nn.Module] = ()) -> None:
        super().__init__(layers)
        self.runner: Runner | None = None
        self.checkpointing = False

    def run(
        self,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Runs all layers.

        Args:
            hidden: input of the first layer.
            memory: [B, M, D], an encoder's output; None: no cross-attention.
            bias: added to the scores of self-attention, [B or 1, H, S, S]; minus infinity masks.
                With `context.fused`, [H, 2 S - 1] by distance.
            context: shared by all layers, except that `keys` is int32 [layers, sites, B].
            positions: int [B, P], the positions that the last layer computes; None: all.
            cache: keys and values of earlier positions.
        """
        # XLA's runner is one loop in the graph; called one by one, each layer would be compiled.
        if self.runner is not None:
            return self.runner(self, hidden, memory, bias, context, positions, cache)
        for index in range(len(self)):
            own = self.of_layer(context, index, positions, cache)
            hidden = self.run_layer(index, hidden, memory, bias, own)
        return hidden

    def of_layer(
        self,
        context: Context,
        index: int,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Context:
        """The context of one layer: its own dropout keys, and positions if it is the last."""
        return replace(
            context,
            keys=None if context.keys is None else context.keys[index],
            # Earlier layers need all positions, as keys and values of the next layer.
            positions=positions if index == len(self) - 1 else None,
            cache=None if cache is None else cache.layers[index],
        )

    def states(
        self,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
        wanted: Collection[int],
        through: int,
        attention: Collection[int] = (),
    ) -> tuple[Hidden, dict[int, Hidden], dict[int, Tensor]]:
        """Runs the first `through` layers; other arguments as for `run`.

        Returns:
            The output of the last one; the hidden states after the layers `wanted`, where 0 is the
            input of the first layer; and the attention scores of the layers `attention`, from 1.
        """
        scores = {}
        found = {0: hidden} if 0 in wanted else {}
        # One by one, without the runner: a loop over layers keeps no states in between.
        for index in range(through):
            kept: list[Tensor] | None = [] if index + 1 in attention else None
            own = replace(self.of_layer(context, index), scores=kept)
            hidden = self.run_layer(index, hidden, memory, bias, own)
            if index + 1 in wanted:
                found[index + 1] = hidden
            if kept:
                scores[index + 1] = kept[0]
        return hidden, found, scores

    def run_layer(
        self,
        index: int,
        hidden: Hidden,
        memory: Tensor | None,
        bias: Tensor | None,
        context: Context,
    ) -> Hidden:
        """Runs one layer, in its own context; other arguments as for `run`.

        With `checkpointing` it recomputes its activations in the backward pass, unless its
        attention scores are kept.
        """
        layer = self[index]
        # Another runner recomputes by itself: outside of its loop, XLA would undo it.
        recomputes = self.checkpointing and self.training and self.runner is None
        if not recomputes or context.scores is not None:
            found: Hidden = layer(hidden, memory, bias, context)
            return found
        # Dropout masks are functions of keys, so there is no generator state to restore.
        recomputed: Hidden = checkpoint(
            layer, hidden, memory, bias, context, use_reentrant=False, preserve_rng_state=False
        )
        return recomputed

    def scan_groups(self, name: str) -> list[ScanGroup]:
        """Groups of consecutive layers with equal static configuration.

        Layers A A B A are the groups A A, B and A. There are none if a layer is used several
        times: a loop would give each use parameters of its own.
        """
        if len(set(self)) < len(self):
            return []
        # groupby groups neighbors only, as a loop needs.
        groups, start = [], 0
        for _, members in groupby(self, key=_static):
            stop = start + len(list(members))
            groups.append(ScanGroup(name, self, start, stop))
            start = stop
        return groups


class ScanGroup(NamedTuple):
    """Consecutive layers with equal static configuration, which one loop can run.

    Attributes:
        name: name of the stack in the model.
        start, stop: the group is `stack[start:stop]`.
    """

    name: str
    stack: Stack
    start: int
    stop: int


def _static(layer: nn.Module) -> Hashable:
    static: Hashable = layer.static
    return static


def place_in_stacks(model: nn.Module, name: str) -> LayerPlace | None:
    """The layer of the parameter `name` in the model's stacks; None if it is in none."""
    # Walks down "encoder.3.ffn.up.weight": `encoder` is a stack, so 3 is the layer's number.
    parts = name.split(".")
    module = model
    for number, part in enumerate(parts[:-1]):
        if isinstance(module, Stack):
            stack, rest = ".".join(parts[:number]), ".".join(parts[number + 1 :])
            return LayerPlace(stack, int(part), len(module), rest)
        module = module.get_submodule(part)
    return None
