"""The outputs of a trained head in another order of the same labels.

An output of a head is known by its number, and its meaning by the name of the label with this
number. Where a dataset numbers the same names differently, the outputs move along with their names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from trainer.checkpoint.layout import StoredTensors
from trainer.models import ModelConfig


def is_reordered(labels: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether both have the same labels, in different orders."""
    return labels != other and sorted(labels) == sorted(other)


def with_label_order(
    config: ModelConfig, tensors: StoredTensors, labels: tuple[str, ...]
) -> tuple[ModelConfig, StoredTensors]:
    """Moves the outputs of a head to the numbers that their labels have in `labels`.

    Args:
        config, tensors: of a trained model.
        labels: those of the model, in another order.
    """
    before = config.labels
    order = [before.index(label) for label in labels]
    more = replace(cast(Any, config), labels=(*before, f"{''.join(before)}+"))
    with torch.device("meta"):
        larger = {name: each.shape for name, each in more.build().named_parameters()}
    moved: dict[str, Tensor] = {}
    # No list of names: whatever grows with the number of labels has an element for each of them.
    for name in tensors:
        pairs = zip(tensors.shape(name), larger.get(name, ()), strict=False)
        for dimension, (length, grown) in enumerate(pairs):
            if length != grown:
                # Transitions between tags have one more, for the begin and the end; it stays last.
                index = torch.tensor([*order, *range(len(order), length)])
                moved[name] = moved.get(name, tensors[name]).index_select(dimension, index)
    pieces = {**tensors.pieces, **StoredTensors.of(moved).pieces}
    return replace(cast(Any, config), labels=labels), StoredTensors(pieces)
