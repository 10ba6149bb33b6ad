"""Loops inside a compiled graph (JAX's `lax.scan`), built on `torch_xla.experimental.scan` of
torch-xla 2.9.

torch-xla's `scan` traces and builds its loops again at every call, which takes the host longer than
the rest of a step, and asks JAX how to partition gradients. Here each loop is built once, and the
caller says how tensors are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trainer.accelerators.kinds.xla import XlaAccelerator

Tree: TypeAlias = Any
"""Tensors in dictionaries and tuples."""
Body: TypeAlias = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""(carried, one element of each stack) -> (carried, results to stack)."""
Step: TypeAlias = Callable[..., tuple[Tree, Tree]]
"""A body, or its gradient, traced to a graph of operations."""


class _Loop(NamedTuple):
    """A loop as an XLA computation, with the inputs that are the same at every call."""

    computation: object
    results: list[Tensor]  # on the meta device: shapes and dtypes of the stacks that it fills
    constants: list[Tensor]
    unflatten_carried: Callable[[list[Tensor]], Tree]
    unflatten_results: Callable[[list[Tensor]], Tree]


class Loops:
    """Runs bodies over stacks of tensors, and differentiates them.

    Args:
        accelerator: the XLA devices.
    """

    def __init__(self, accelerator: XlaAccelerator) -> None:
        self._accelerator = accelerator
        # (body, partition, shapes) -> forward step, the inputs to save, backward step
        self._traced: dict[
            tuple[object, ...], tuple[Step, Callable[..., Sequence[Tensor]], Step]
        ] = {}
        self._built: dict[Step, _Loop] = {}

    def scan(
        self, body: Body, carried: Tree, stacked: Tree, partition: Callable[..., object]
    ) -> tuple[Tree, Tree]:
        """Calls `body` for each element along the first dimension of the stacks.

        Args:
            body: a function of its arguments alone, the same object in every step.
            carried: floating-point tensors that each call passes to the next one.
            stacked: tensors [N, ...]; call i gets element i.
            partition: a partition function of AOTAutograd, which decides what the forward pass
                saves and what the backward pass recomputes.

        Returns:
            The carried tensors after the last call, and the stacked results of all calls.
        """
        from torch_xla.experimental.scan import value_and_grad_partitioned

        # A view would be recorded inside the loop, when the loop first uses it. A clone is
        # recorded here.
        carried = tree_map(Tensor.clone, carried)
        leaves = tree_leaves((carried, stacked))
        key = (body, partition, *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves))
        with self._accelerator.unwatched():
            if key not in self._traced:
                self._traced[key] = value_and_grad_partitioned(body, carried, stacked, partition)
        # The traced steps contain autocast's casts already.
        with torch.autocast(leaves[0].device.type, enabled=False):
            return _scan()(self, *self._traced[key], carried, stacked)

    def run(
        self, step: Step, carried: Tree, stacked: Tree, reverse: bool = False
    ) -> tuple[Tree, Tree]:
        """Calls a traced step for each element, as `scan` does, without differentiating it."""
        from torch_xla import _XLAC
        from torch_xla.experimental.scan import tree_flatten_none

        with self._accelerator.unwatched():
            if step not in self._built:
                self._built[step] = _build(step, carried, stacked, reverse)
        loop = self._built[step]
        (flat, _), (stacks, _) = tree_flatten_none(carried), tree_flatten_none(stacked)
        device = flat[0].device
        results = [
            torch.zeros(each.shape, dtype=each.dtype, device=device) for each in loop.results
        ]
        # The layout of torch-xla's computation, for inputs and outputs alike: the loop counter, the
        # carried tensors, the stacks to read, the stacks to fill. Constants are inputs only.
        inputs = [torch.tensor(0, device=device), *flat, *stacks, *results, *loop.constants]
        outputs = list(_XLAC._xla_user_computation("xla::scan", inputs, loop.computation))[1:]
        begin = len(flat) + len(stacks)
        filled = outputs[begin : begin + len(results)]
        return loop.unflatten_carried(outputs[: len(flat)]), loop.unflatten_results(filled)


def _build(step: Step, carried: Tree, stacked: Tree, reverse: bool) -> _Loop:
    """Lets torch-xla build a loop, and intercepts the computation that it would run."""
    from torch_xla.experimental import scan

    with _kept_computations() as kept:
        after, results = scan._scan_impl_pytree(step, carried, stacked, reverse)
    ((inputs, computation),) = kept
    flat, unflatten_carried = scan.tree_flatten_none(after)
    stacks, _ = scan.tree_flatten_none(stacked)
    filled, unflatten_results = scan.tree_flatten_none(results)
    # Behind the counter, the carried tensors and both kinds of stacks (see `run`).
    constants = 1 + len(flat) + len(stacks) + len(filled)
    filled = [torch.empty_like(each, device="meta") for each in filled]
    return _Loop(
        computation, filled, list(inputs[constants:]), unflatten_carried, unflatten_results
    )


@contextmanager
def _kept_computations() -> Iterator[list[tuple[Sequence[Tensor], object]]]:
    """Collects the inputs and the computation of each loop that is run inside the block."""
    from torch_xla import _XLAC

    kept: list[tuple[Sequence[Tensor], object]] = []
    hand_over: Callable[[str, Sequence[Tensor], object], object] = _XLAC._xla_user_computation

    def keep(name: str, inputs: Sequence[Tensor], computation: object) -> object:
        if name == "xla::scan":  # the body may call others
            kept.append((inputs, computation))
        return hand_over(name, inputs, computation)

    _XLAC._xla_user_computation = keep
    try:
        yield kept
    finally:
        _XLAC._xla_user_computation = hand_over


@cache
def _scan() -> Step:
    """The differentiable function; created on first use, as torch-xla may not be installed."""
    from torch_xla.experimental.pytreeify import pytreeify

    scan: Step = pytreeify(_Scan).apply
    return scan


class _Context(Protocol):
    """Values that the forward pass saves for the backward pass."""

    loops: Loops
    backward_step: Step
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Scan(torch.autograd.Function):
    """A forward loop over the layers, and a backward loop over them in reverse order."""

    @staticmethod
    def forward(
        ctx: _Context,
        loops: Loops,
        forward: Step,
        with_inputs: Callable[..., Sequence[Tensor]],
        backward: Step,
        carried: Tree,
        stacked: Tree,
    ) -> tuple[Tree, Tree]:
        with torch.no_grad():
            after, (results, activations) = loops.run(forward, carried, stacked)
        saved = with_inputs(activations, stacked)
        ctx.save_for_backward(*saved)
        ctx.loops, ctx.backward_step = loops, backward
        return after, results

    @staticmethod
    def backward(ctx: _Context, grad_after: Tree, grad_results: Tree) -> tuple[Tree, ...]:
        with torch.no_grad():
            stacked = (grad_results, tuple(ctx.saved_tensors))
            grads = ctx.loops.run(ctx.backward_step, grad_after, stacked, reverse=True)
        return None, None, None, None, *grads
