"""The first step, and there the first tensor, in which two lists of digests differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Mapping[int, Row]
"""Rows of digests.jsonl by step; step 0, or a checkpoint's, may have the state only."""

Stage = Literal["batch", "loss", "gradients", "state", "norm"]

_TEXTS: Mapping[Stage, str] = {
    "batch": "the examples of the batch",
    "loss": "the loss, of equal examples and equal weights before it",
    "gradients": "the gradient",
    "state": "the state after the update",
    "norm": "the norm of the gradient",
}
_SHOWN = 5  # names of tensors


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        equal: the last step with the same row in both; 0: none is known.
        step: the first step in which something differs.
        stage: the first result of the step that differs, in the order of computation.
        tensors: names, of gradients or of the state.
        others: number of tensors that are equal.
    """

    equal: int
    step: int
    stage: Stage
    tensors: tuple[str, ...] = ()
    others: int = 0

    def __str__(self) -> str:
        where = _TEXTS[self.stage]
        if self.tensors:
            count = len(self.tensors)
            names = ", ".join(self.tensors[:_SHOWN]) + (", ..." if count > _SHOWN else "")
            where += f": {names} ({count} of {count + self.others} tensors)"
        return f"step {self.step}: {where}"


def first_difference(one: Rows, two: Rows) -> Difference | None:
    """Finds the first step in which rows differ; only steps that both have are compared."""
    equal = 0
    for step in sorted(one.keys() & two.keys()):
        if (found := _row_difference(equal, step, one[step], two[step])) is not None:
            return found
        equal = step
    return None


def _row_difference(equal: int, step: int, one: Row, two: Row) -> Difference | None:
    # Norms of the steps up to this one; a restart may have cut the list of one run.
    norms = list(zip(reversed(one.get("norms", ())), reversed(two.get("norms", ())), strict=False))
    for back in range(len(norms) - 1, 0, -1):
        # By their texts: equal infinities and NaN are no difference.
        if repr(norms[back][0]) != repr(norms[back][1]):
            return Difference(equal, step - back, "norm")
    numbers: tuple[Stage, ...] = ("batch", "loss")
    for stage in numbers:
        if stage in one and stage in two and repr(one[stage]) != repr(two[stage]):
            return Difference(equal, step, stage)
    tensors: tuple[Stage, ...] = ("gradients", "state")
    for stage in tensors:
        old, new = one.get(stage, {}), two.get(stage, {})
        names = [name for name in old if name in new]
        if differ := tuple(name for name in names if old[name] != new[name]):
            if stage == "gradients":  # in the order of the backward pass
                differ = differ[::-1]
            return Difference(equal, step, stage, differ, len(names) - len(differ))
    return None
