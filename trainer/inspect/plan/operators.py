"""The operators of a training step: their computations, reads and writes.

A step is run on tensors without memory (see `trace`), and every operator that PyTorch dispatches is
recorded. Tensors are recorded as values: a storage has a new value after each write, and a view is
the value of its base. So the record is a graph, from which fusion follows.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.models import Model
from trainer.models.layers import Projection
from trainer.models.layers.attention import Attention

Kind: TypeAlias = Literal["products", "attention", "elementwise", "loss", "optimizer", "other"]
KINDS: tuple[Kind, ...] = (
    "products",
    "attention",
    "elementwise",
    "loss",
    "optimizer",
    "other",
)
"""Classes of operators:

products: of activations with weights, in layers and embeddings.
attention: from queries, keys and values to mixed values: two products, softmax, mask and dropout.
elementwise: norms, activations, residuals, dropout and casts, outside of attention.
loss: the head, its product with the vocabulary included, and the objective.
optimizer: clipping's norm is left out; it reads the gradients once.
other: embeddings, gathers, scatters, concatenations and sums of micro-batches' gradients.
"""

_PRODUCTS = ("mm", "addmm", "linear", "convolution", "convolution_backward")
_BATCHED = ("bmm", "baddbmm")
_MOVES = ("embedding", "gather", "index", "index_select", "cat", "stack")
# They write where an index says, so they end a fused kernel.
_SCATTERS = ("scatter", "index_add", "index_put", "embedding_dense_backward", "index_copy")
_SERIAL = ("sort", "topk", "cumsum", "_foreach", "_fused", "unique", "nonzero")
_NO_KERNEL = ("empty", "new_empty", "lift_fresh", "_local_scalar_dense", "is_same_size")
_MULTI_TENSOR = 48  # tensors of one launch of a multi-tensor kernel (MultiTensorApply.cuh)


class Use(NamedTuple):
    """A value that an operator reads or writes.

    Attributes:
        value: its number.
        offset: of the first element; parts of a value, such as queries and keys, differ in it.
        nbytes: that are read or written.
        narrows: whether it is an fp32 activation, which an implementation may keep in 16 bits.
    """

    value: int
    offset: int
    nbytes: int
    narrows: bool


class Scope(NamedTuple):
    """The part of the model that an operator belongs to.

    Attributes:
        name: attention, model, loss or optimizer.
        unit: number of the call of a layer, which `training.compile` compiles; None outside.
        call: number of the call of an attention module.
    """

    name: Literal["attention", "model", "loss", "optimizer"]
    unit: int | None = None
    call: int | None = None


@dataclass(frozen=True)
class Operator:
    """An operator of a step.

    Attributes:
        name: PyTorch's, such as "addmm".
        kind: its class.
        scope: the part of the model.
        backward: whether it runs in the backward pass.
        flops: of matrix products; 0 for others.
        reads, writes: its values.
        launches: number of kernels.
        fusible: whether a compiler fuses it with operators around it.
        accumulates: whether it adds to the gradient of earlier micro-batches.
    """

    name: str
    kind: Kind
    scope: Scope
    backward: bool
    flops: float
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    launches: int = 1
    fusible: bool = False
    accumulates: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(use.nbytes for use in (*self.reads, *self.writes))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run while it is active.

    Args:
        persistent: parameters, gradients and optimizer state, which no implementation narrows.
    """

    def __init__(self, persistent: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.scope = Scope("loss")
        self._values: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._persistent = weakref.WeakSet(each.untyped_storage() for each in persistent)
        self._count, self._calls, self._depth = 0, 0, 0
        # Autograd's nodes are numbered in the order of their creation. A node of the backward pass
        # belongs to the scope that was active when it was created: here are the first numbers of
        # scopes, in ascending order.
        self._first_nodes: list[int] = [0]
        self._scopes: list[Scope] = [self.scope]

    @contextmanager
    def scopes_of(self, model: Model) -> Iterator[None]:
        """Follows the calls of a model's modules; operators outside of them belong to the loss."""
        units = set(map(id, model.compiled_units()))
        handles = []
        outer: list[Scope] = []

        def enter(module: nn.Module, name: str) -> None:
            outer.append(self.scope)
            unit = self.scope.unit
            if id(module) in units:
                self._calls += 1
                unit = self._calls
            if isinstance(module, Attention):
                self._calls += 1
                self._switch(Scope("attention", unit, self._calls))
            elif name.rpartition(".")[2].endswith("head"):
                self._switch(Scope("loss"))
            else:
                self._switch(Scope("model", unit))
            self._depth += 1

        def leave() -> None:
            self._depth -= 1
            self._switch(outer.pop())

        for name, module in model.named_modules():
            is_head = name.rpartition(".")[2].endswith("head")
            is_part = isinstance(module, Attention | Projection) or id(module) in units
            if module is model or is_part or is_head:
                handles += [
                    module.register_forward_pre_hook(lambda m, _, name=name: enter(m, name)),
                    module.register_forward_hook(lambda *_: leave(), always_call=True),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _switch(self, scope: Scope) -> None:
        self.scope = scope
        self._first_nodes.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._scopes.append(scope)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # Before the operator runs: it may give an input a new value.
        reads = [self._use(each) for each in inputs]
        known = {each.untyped_storage() for each in inputs}
        outputs = func(*args, **kwargs)
        made = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        changes = func._schema.is_mutable
        # A view has the storage of its base: nothing is computed.
        is_view = not changes and all(each.untyped_storage() in known for each in made)
        name = func._overloadpacket.__name__
        if is_view or name.startswith(_NO_KERNEL):
            return outputs
        if changes:
            made = [
                tensor
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                # Fused optimizers write gradients only if they unscale them.
                if argument.name != "grads"
                for tensor in tree_leaves(value)
                if isinstance(tensor, Tensor)
            ]
        writes = [self._write(each) for each in made]
        if name.removesuffix("_") in ("copy", "fill", "zero") and changes:
            reads = reads[1:]  # the old value is not read
        flops = _flops(func, args, kwargs, outputs, inputs)
        self._record(name, flops, reads, writes, inputs, func, args)
        return outputs

    def _record(
        self,
        name: str,
        flops: float,
        reads: list[Use],
        writes: list[Use],
        inputs: list[Tensor],
        func: OpOverload[..., object],
        args: tuple[object, ...],
    ) -> None:
        node = torch._C._current_autograd_node()
        scope, accumulates = self.scope, False
        if node is not None and self._depth == 0:
            # Not in a layer that is recomputed. Sums of gradients have no number of their own.
            number = node._sequence_nr()
            accumulates = node.name().endswith("AccumulateGrad")
            scope = self._scopes[bisect_right(self._first_nodes, number) - 1]
        stem = name.removesuffix("_")
        is_moved = stem in _MOVES or stem.startswith(_SCATTERS)
        kind: Kind
        if accumulates:
            kind, scope = "other", Scope("model")
        elif scope.name in ("loss", "optimizer"):
            kind = scope.name
        elif scope.name == "attention" or stem in _BATCHED or "attention" in stem:
            kind = "attention"
        elif stem in _PRODUCTS:
            kind = "products"
        else:
            kind = "other" if is_moved else "elementwise"
        tensors = max((len(each) for each in args if isinstance(each, list | tuple)), default=1)
        many = stem.startswith(("_foreach", "_fused"))
        is_product = flops > 0 or stem in (*_PRODUCTS, *_BATCHED)
        self.operators.append(
            Operator(
                name,
                kind,
                scope,
                node is not None,
                flops,
                tuple(reads),
                tuple(writes),
                launches=-(-tensors // _MULTI_TENSOR) if many else 1,
                fusible=not (
                    is_product
                    or accumulates
                    or stem.startswith((*_SCATTERS, *_SERIAL))
                    or _sums_columns(func, inputs, args)
                ),
                accumulates=accumulates,
            )
        )

    def _use(self, tensor: Tensor) -> Use:
        storage = tensor.untyped_storage()
        if storage not in self._values:
            self._count += 1
            self._values[storage] = self._count
        # An expanded tensor has more elements than memory.
        nbytes = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        narrows = tensor.dtype == torch.float32 and storage not in self._persistent
        return Use(self._values[storage], int(tensor.storage_offset()), nbytes, narrows)

    def _write(self, tensor: Tensor) -> Use:
        self._count += 1
        self._values[tensor.untyped_storage()] = self._count
        return self._use(tensor)


def _flops(
    func: OpOverload[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    outputs: object,
    inputs: list[Tensor],
) -> float:
    """FLOPs of a matrix product, or of fused attention; 0 for other operators."""
    name = func._overloadpacket.__name__
    if "scaled_dot_product" in name:  # PyTorch has no formula for the CPU's kernel
        backward = "backward" in name  # whose first input is the gradient
        query, key = inputs[1:3] if backward else inputs[:2]
        return (2.5 if backward else 1.0) * 4 * query.numel() * key.shape[-2]
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=outputs)) if count else 0.0


def _sums_columns(func: object, inputs: list[Tensor], args: tuple[object, ...]) -> bool:
    """Whether it sums over rows, as for the gradient of a bias: a kernel that goes by columns."""
    if func is not torch.ops.aten.sum.dim_IntList or len(args) < 2 or not inputs:
        return False
    dims = args[1]
    assert isinstance(dims, list | tuple)
    last = inputs[0].ndim - 1
    return bool(dims) and not any(each in (last, -1) for each in dims)
