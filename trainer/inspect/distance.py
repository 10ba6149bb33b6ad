"""Distances between the weights of two checkpoints, for `samestep checkpoint distance`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from samestep.errors import CheckpointError
from trainer.models import Model
from trainer.training.weights.loading import Weights

ALL = "all"
"""Name of the group of all parameters."""


@dataclass
class Group:
    """Parameters of one part of a model.

    Attributes:
        parameters: number of elements.
        moved: sum of the squared differences.
        size: sum of the squared elements before.
    """

    parameters: int = 0
    moved: float = 0.0
    size: float = 0.0

    @property
    def relative(self) -> float:
        """The L2 norm of the difference, divided by the norm before."""
        if not self.size:
            return math.inf if self.moved else 0.0
        return math.sqrt(self.moved / self.size)


def by_group(before: Weights, after: Weights) -> dict[str, Group]:
    """Compares the parameters that two checkpoints have in common.

    Returns:
        The embeddings, each layer ("layers.0", ...), parameters outside of these ("shared"), the
        head if both have the same one, and "all", in this order. A stack's name is as in
        the names of parameters.

    Raises:
        CheckpointError: they have no parameter in common.
    """
    groups: dict[str, Group] = {ALL: Group()}
    for name, part in _common(before, after).items():
        old, new = (weights.tensors[name].double() for weights in (before, after))
        moved, size = float((new - old).square().sum()), float(old.square().sum())
        for group in (ALL, part):
            found = groups.setdefault(group, Group())
            found.parameters += old.numel()
            found.moved += moved
            found.size += size
    if not groups[ALL].parameters:
        raise CheckpointError(
            f"{after.folder} has no parameter of the name and shape of one in {before.folder}. "
            "Compare checkpoints of one architecture"
        )
    groups[ALL] = groups.pop(ALL)  # the last one
    return groups


def left_out(before: Weights, after: Weights) -> list[str]:
    """Names of the parameters that `by_group` skips."""
    return sorted({*before.tensors, *after.tensors}.difference(_common(before, after)))


def _common(before: Weights, after: Weights) -> dict[str, str]:
    """The parameters that two checkpoints have in common, and the group of each."""
    with torch.device("meta"):
        model = before.config.build()
    groups = {
        name: _group(model, name)
        for name in before.tensors
        if name in after.tensors and before.tensors.shape(name) == after.tensors.shape(name)
    }
    if before.config.head == after.config.head:
        return groups
    # Heads of two kinds may have matrices of one name, such as head.dense: the later one is new.
    return {name: group for name, group in groups.items() if group != "head"}


def _group(model: Model, name: str) -> str:
    if (place := model.layer_of(name)) is not None:
        return f"{place.stack}.{place.number}"
    part = model.role(name).part
    return "embeddings" if part == "embedding" else part
