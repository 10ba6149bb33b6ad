"""The outputs of a trained head in another order of the same labels.

An output of a head is known by its number, and its meaning by the name of the label with this
number. Where a dataset numbers the same names differently, the outputs move along with their names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.checkpoint.layout import StoredTensors
from trainer.models import ModelConfig
from trainer.training.weights.added_tokens import growing_dimensions


def is_reordered(labels: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether both have the same labels, in different orders."""
    return labels != other and sorted(labels) == sorted(other)


def with_label_order(
    config: ModelConfig, tensors: StoredTensors, labels: tuple[str, ...]
) -> tuple[ModelConfig, StoredTensors]:
    """Moves the outputs of a head to the numbers that their labels have in `labels`.

    Args:
        config, tensors: of a trained model.
        labels: the model's labels, in another order.
    """
    before = config.labels
    order = [before.index(label) for label in labels]
    # A parameter that grows with the number of labels has an element for each of them.
    grown = growing_dimensions(config, labels=(*before, f"{''.join(before)}+"))
    moved: dict[str, Tensor] = {}
    for name in grown.keys() & set(tensors):
        moved[name] = tensors[name]
        for dimension in grown[name]:
            # Transitions between tags have one more, for the begin and the end; it stays last.
            others = range(len(order), moved[name].shape[dimension])
            moved[name] = moved[name].index_select(dimension, torch.tensor([*order, *others]))
    pieces = {**tensors.pieces, **StoredTensors.of(moved).pieces}
    return config.with_settings(labels=labels), StoredTensors(pieces)
