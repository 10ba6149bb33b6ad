"""Stacks of layers: how they are run, and what a layer is told besides its hidden states."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.models.cache import Cache, LayerCache

Hidden = TypeVar("Hidden", bound=Tensor | tuple[Tensor, ...])
"""What flows from layer to layer: [B, S, D], or a (named) tuple of such tensors, for two streams
or a state."""


@dataclass(frozen=True)
class Context:
    """What a layer needs besides its differentiable tensors.

    Those are arguments of their own, because the hooks of strategies look for tensors in tuples
    and dictionaries, not in objects.

    Attributes:
        mask: of self-attention: bool, True where attention is allowed; broadcasts to
            [B, H, S, S]. None: nothing is masked, or with `causal` what is later. In a loop of
            XLA, scores to add instead; for a kernel that takes them, int32 segments [B, S].
        causal: whether positions attend to those before them only. A `mask` of four dimensions
            already says so.
        segments: int [B, S], where they say all that `mask` does apart from `causal`, so that a
            kernel may take them in its place.
        sites: names of the places where a layer applies dropout, in the order of `keys`.
        keys: int32 [sites, B], a random key for each row at each site; None: no dropout.
        positions: int [B, P], the only positions that the layer has to compute; None: all.
        memory_mask: of cross-attention, like `mask`.
        cache: keys and values of the positions before these.
        columns: what the model's layers read of `Inputs.extra`.
    """

    mask: Tensor | None = None
    causal: bool = False
    segments: Tensor | None = None
    sites: tuple[str, ...] = ()
    keys: Tensor | None = None
    positions: Tensor | None = None
    memory_mask: Tensor | None = None
    cache: LayerCache | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def key(self, site: str) -> Tensor | None:
        """The dropout key of each row at a site, int32 [B]; None: no dropout there."""
        if self.keys is None or site not in self.sites:
            return None
        return self.keys[self.sites.index(site)]


class LayerPlace(NamedTuple):
    """The layer that a parameter belongs to.

    Attributes:
        stack: name of its stack of layers.
        number: of the layer in the stack, from 0.
        depth: number of layers in the stack.
        rest: name of the parameter inside its layer.
    """

    stack: str
    number: int
    depth: int
    rest: str

    def at(self, number: int) -> str:
        """The name of the same parameter in another layer of the stack."""
        return f"{self.stack}.{number}.{self.rest}"


class Runner(Protocol):
    """Runs the layers of a stack; the arguments are those of `Stack.run`."""

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
    """Layers that run one after the other.

    A layer is called as layer(hidden, memory, bias, context) and returns hidden states of the
    same structure. It names its static configuration in an attribute `static`: layers with equal
    values compute the same function of their parameters and inputs.

    Attributes:
        runner: runs the layers; a strategy may put its own in place of `one_by_one`.
        checkpointing: whether layers recompute their activations in the backward pass.
    """

    def __init__(self, layers: Sequence[nn.Module] | Iterator[nn.Module] = ()) -> None:
        super().__init__(layers)
        self.runner: Runner = one_by_one
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
            hidden: what the first layer reads.
            memory: [B, M, D], an encoder's output; None: there is no cross-attention.
            bias: added to the scores of self-attention, [B or 1, H, S, S]; minus infinity masks.
            context: for all layers alike, but for `keys`: int32 [layers, sites, B].
            positions: int [B, P], the positions that the last layer computes; None: all.
            cache: keys and values of earlier positions.
        """
        return self.runner(self, hidden, memory, bias, context, positions, cache)

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
    ) -> tuple[Hidden, dict[int, Hidden]]:
        """Runs the first `through` layers; other arguments as of `run`.

        Returns:
            What the last one returns, and the hidden states after the layers `wanted`, where 0
            stands for what the first layer reads.
        """
        found = {0: hidden} if 0 in wanted else {}
        for index in range(through):
            hidden = self[index](hidden, memory, bias, self.of_layer(context, index))
            if index + 1 in wanted:
                found[index + 1] = hidden
        return hidden, found

    def scan_groups(self, name: str) -> list[ScanGroup]:
        """Runs of layers with equal static configuration.

        Layers A A B A of two kinds are the groups A A, B and A. There are none where a layer is
        used several times: a loop would give each use parameters of its own.
        """
        if len(set(self)) < len(self):
            return []
        groups, start = [], 0
        for _, members in groupby(self, key=_static):
            stop = start + len(list(members))
            groups.append(ScanGroup(name, self, start, stop))
            start = stop
        return groups


class ScanGroup(NamedTuple):
    """Layers of equal static configuration that follow each other, so that one loop can run them.

    Attributes:
        name: name of the stack in the model.
        stack: runs its layers by its `runner`, which a strategy may replace.
        start, stop: the group is `stack[start:stop]`.
    """

    name: str
    stack: Stack
    start: int
    stop: int


def _static(layer: nn.Module) -> Hashable:
    static: Hashable = layer.static
    return static


def one_by_one(
    stack: Stack,
    hidden: Hidden,
    memory: Tensor | None,
    bias: Tensor | None,
    context: Context,
    positions: Tensor | None,
    cache: Cache | None,
) -> Hidden:
    """Calls one layer after the other."""
    for index, layer in enumerate(stack):
        own = stack.of_layer(context, index, positions, cache)
        if stack.checkpointing and stack.training:
            # Dropout masks come from keys, so there is no generator state to restore.
            hidden = checkpoint(
                layer, hidden, memory, bias, own, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden = layer(hidden, memory, bias, own)
    return hidden


def place_in_stacks(model: nn.Module, name: str) -> LayerPlace | None:
    """The layer of the parameter `name` in one of the model's stacks; None: it is in none."""
    parts = name.split(".")
    module = model
    for number, part in enumerate(parts[:-1]):
        if isinstance(module, Stack):
            stack, rest = ".".join(parts[:number]), ".".join(parts[number + 1 :])
            return LayerPlace(stack, int(part), len(module), rest)
        module = getattr(module, part)
    return None
