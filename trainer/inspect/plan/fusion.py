"""From operators to the kernels of eager, compiled and fused implementations.

`compiled` follows the rules of Inductor that decide memory traffic:

- Elementwise operators, reductions over the last axis and gathers that depend on each other are one
  kernel, which reads each value once, and writes only values that others read. Matrix products,
  scatters and sums over rows end a kernel. Only sharding units are compiled, each by itself.
- A kernel computes a value again if its inputs are smaller than the value itself, as Inductor and
  the partitioner of AOTAutograd do. So dropout masks are hashed again instead of stored.

Example: addmm -> dropout (11 operators of integers) -> add the residual -> norm is two kernels, the
product and the rest, and the rest reads the product's output and the residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from trainer.inspect.plan.operators import Kind, Operator, Use

HASHED = 4.5
"""Integer operations for a score with dropout in a kernel of fused attention, as compiled for H100.

Three more, products, are on the units of floating point.
"""


@dataclass(frozen=True)
class Implementation:
    """How operators become kernels.

    Attributes:
        compiles: fuses elementwise operators inside of layers.
        whole: fuses them everywhere, as XLA does.
        fuses_attention: one kernel for each pass keeps the scores out of memory. The backward
            kernel computes them again.
        fuses_loss: fuses the elementwise operators of the loss, a chunk of rows at a time, on
            logits in 16 bits.
        narrow: keeps all activations in 16 bits, the residual stream included.
        speedup: of the layers' matrix products over 16 bits: 2 for fp8.
    """

    compiles: bool = False
    whole: bool = False
    fuses_attention: bool = False
    fuses_loss: bool = False
    narrow: bool = False
    speedup: float = 1.0


EAGER = Implementation()
COMPILED = Implementation(compiles=True)
FUSED = Implementation(compiles=True, fuses_attention=True)
IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {"eager": EAGER, "compiled": COMPILED, "fused": FUSED}
)


@dataclass
class Kernel:
    """A kernel, or several of the same kind.

    Attributes:
        kind: the class of its operators.
        backward: whether it runs in the backward pass.
        flops: of matrix products.
        nbytes: that it reads and writes in memory.
        launches: number of kernels.
        attends: whether it is a fused attention.
        hashes: integer operations of dropout masks inside of a fused attention.
        accumulates: whether it adds to the gradient of earlier micro-batches.
        operators: names of its operators.
        largest: bytes of the largest value that it writes.
        reads: bytes that it reads, of `nbytes`.
    """

    kind: Kind
    backward: bool
    flops: float
    nbytes: float
    launches: int = 1
    attends: bool = False
    hashes: float = 0.0
    accumulates: bool = False
    operators: tuple[str, ...] = ()
    largest: float = 0.0
    reads: float = 0.0


_Uses: TypeAlias = dict[tuple[int, int], Use]
"""By value and offset: a kernel reads each part of a value once."""


@dataclass
class _Group:
    """Operators that become one kernel."""

    operators: list[int] = field(default_factory=list)
    reads: _Uses = field(default_factory=dict)
    writes: dict[int, Use] = field(default_factory=dict)


def kernels(operators: Sequence[Operator], implementation: Implementation) -> list[Kernel]:
    """Returns the kernels that run these operators."""
    return list(_Graph(operators, implementation).kernels())


class _Graph:
    """The operators as a graph of groups: operator -> group -> kernel."""

    def __init__(self, operators: Sequence[Operator], implementation: Implementation) -> None:
        self._operators, self._how = operators, implementation
        self._producer = {
            use.value: number for number, each in enumerate(operators) for use in each.writes
        }
        self._group_of = list(range(len(operators)))
        self._join()
        self._groups: dict[int, _Group] = {}
        for number, operator in enumerate(operators):
            group = self._groups.setdefault(self._root(number), _Group())
            group.operators.append(number)
            for use in operator.writes:
                group.writes[use.value] = use
        # After all writes are known: a value made in the group is not read from memory.
        for number, operator in enumerate(operators):
            group = self._groups[self._root(number)]
            for use in operator.reads:
                known = group.reads.get(use[:2])
                if use.value not in group.writes and (known is None or known.nbytes < use.nbytes):
                    group.reads[use[:2]] = use
        if implementation.compiles or implementation.whole or implementation.fuses_attention:
            self._recompute()
            self._forget()

    def _region(self, operator: Operator) -> object:
        """Operators with the same region may become one kernel; with None they may not."""
        scope, how = operator.scope, self._how
        if how.fuses_attention and operator.kind == "attention" and scope.call is not None:
            return (scope.call, operator.backward)
        if not operator.fusible or scope.name == "optimizer":
            return None
        if how.whole:
            return "all"
        if how.fuses_loss and operator.kind == "loss":
            return "loss"
        return scope.unit if how.compiles else None

    def _join(self) -> None:
        """Joins operators into groups.

        The level of an operator is the number of operators with separate kernels that have to run
        before it. Operators of one level never wait for each other through another kernel, so
        joining them makes no cycle.
        """
        level_of: dict[int, int] = {}  # of values
        readers: dict[tuple[int, int, object, bool], int] = {}
        whole: dict[object, int] = {}
        for number, operator in enumerate(self._operators):
            region = self._region(operator)
            level = max((level_of.get(use.value, 0) for use in operator.reads), default=0)
            alone = region is None
            for use in operator.writes:
                # Behind a kernel of its own comes the next level.
                level_of[use.value] = level + alone
            if alone:
                continue
            if isinstance(region, tuple):  # a fused attention, products included
                self._unite(number, whole.setdefault(region, number))
                # Its readers run in a later kernel, as behind a product.
                for use in operator.writes:
                    level_of[use.value] = level + 1
                continue
            for use in operator.reads:
                producer = self._producer.get(use.value)
                if producer is not None and producer < number:
                    same = self._region(self._operators[producer]) == region
                    if same and self._level(producer, level_of) == level:
                        self._unite(number, producer)
                # Siblings read a value once.
                key = (use.value, level, region, operator.backward)
                self._unite(number, readers.setdefault(key, number))

    def _level(self, number: int, level_of: Mapping[int, int]) -> int:
        return max((level_of[use.value] for use in self._operators[number].writes), default=0)

    def _root(self, number: int) -> int:
        while self._group_of[number] != number:
            self._group_of[number] = self._group_of[self._group_of[number]]
            number = self._group_of[number]
        return number

    def _unite(self, first: int, second: int) -> None:
        first, second = self._root(first), self._root(second)
        self._group_of[max(first, second)] = min(first, second)

    def _recompute(self) -> None:
        """Lets groups compute values of other groups again, if that reads less."""
        slices: dict[int, _Uses] = {}
        for group in self._groups.values():
            if not self._is_fused(group):
                continue
            # A fused attention stores no scores, however small they are.
            group_call = self._operators[group.operators[0]].scope.call
            # A list, as the reads change meanwhile.
            for use in list(group.reads.values()):
                producer = self._producer.get(use.value)
                if producer is None:
                    continue
                source = self._groups[self._root(producer)]
                if not self._is_fused(source) or self._unit(source) != self._unit(group):
                    continue
                inputs = self._slice(use.value, source, slices)
                # What the group reads anyway costs nothing.
                cost = sum(each.nbytes for key, each in inputs.items() if key not in group.reads)
                attends = isinstance(self._region(self._operators[producer]), tuple)
                inside = self._operators[producer].scope.call == group_call
                if cost < use.nbytes or (attends and inside):
                    del group.reads[use[:2]]
                    for key, each in inputs.items():
                        group.reads.setdefault(key, each)

    def _unit(self, group: _Group) -> object:
        """The graph that a compiler sees: other graphs cannot compute its values again."""
        operator = self._operators[group.operators[0]]
        return self._how.whole or (operator.kind == "loss", operator.scope.unit)

    def _is_fused(self, group: _Group) -> bool:
        return self._region(self._operators[group.operators[0]]) is not None

    def _slice(self, value: int, group: _Group, found: dict[int, _Uses]) -> _Uses:
        """The inputs of a group from which it computes a value."""
        if value not in found:
            inputs: _Uses = {}
            for use in self._operators[self._producer[value]].reads:
                if use.value in group.writes:
                    inputs |= self._slice(use.value, group, found)
                else:
                    inputs[use[:2]] = use
            found[value] = inputs
        return found[value]

    def _forget(self) -> None:
        """Drops the writes of values that no other group reads."""
        read = {value for group in self._groups.values() for value, _ in group.reads}
        for group in self._groups.values():
            if self._is_fused(group):
                group.writes = {v: use for v, use in group.writes.items() if v in read}

    def kernels(self) -> Iterator[Kernel]:
        """One kernel for each group."""
        # Products, and integer operations of dropout, of forward attention by call.
        forward: dict[int | None, tuple[float, float]] = {}
        for group in self._groups.values():
            if self._is_fused(group) and not group.writes:
                continue  # every reader computes it again
            members = [self._operators[number] for number in group.operators]
            # A kernel is of the class of its largest part.
            main = max(members, key=lambda each: (each.flops, each.nbytes))
            whole = isinstance(self._region(main), tuple)
            flops, hashes = sum(each.flops for each in members), 0.0
            if whole:
                if main.backward:
                    # Five products instead of two: scores again, and gradients of both.
                    flops, hashes = forward.get(main.scope.call, (flops / 2, 0.0))
                    flops *= 2.5
                    hashes *= 2  # in the kernels of both gradients
                else:
                    hashes = _hashes(members)
                    forward[main.scope.call] = flops, hashes
            used = [*group.reads.values(), *group.writes.values()]
            yield Kernel(
                main.kind,
                main.backward,
                flops,
                sum(map(self._nbytes, used)),
                launches=1 if len(members) > 1 else main.launches,
                attends=whole or "attention" in main.name,
                hashes=hashes,
                accumulates=main.accumulates,
                operators=tuple(each.name for each in members),
                largest=max(map(self._nbytes, group.writes.values()), default=0),
                reads=sum(map(self._nbytes, group.reads.values())),
            )

    def _nbytes(self, use: Use) -> float:
        narrows = use.narrows and self._how.narrow
        return use.nbytes / 2 if narrows else use.nbytes


def _hashes(members: Sequence[Operator]) -> float:
    """Integer operations of the dropout masks of an attention; 0 without dropout.

    A mask of fp32 or int32 has 4 bytes for each score.
    """
    hashed = [
        use.nbytes / 4 for each in members if each.name == "bitwise_xor_" for use in each.writes
    ]
    return HASHED * max(hashed, default=0.0)
