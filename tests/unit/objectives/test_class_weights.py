"""Weights of classes and label smoothing: the same as torch's over the whole global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from samestep.config import decode, to_tree
from samestep.errors import ConfigError
from samestep.examples import Examples
from tests.unit.objectives.test_task_objectives import (
    PAIRS,
    TAGS,
    VOCABULARY,
    Stub,
    as_tensors,
    only,
)
from trainer.objectives.class_weights import ClassLoss, InOrder
from trainer.objectives.kinds import classification, distillation, sift, tagging

NAMES = ("a", "b", "c", "d")
WEIGHTS = {"b": 2.5, "c": 0.25, "a": 1.5}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("kind", "examples", "classes"),
    [(classification, PAIRS, 3), (tagging, TAGS, 4)],
    ids=["classification", "tagging"],
)
def test_micro_batches_add_up_to_the_loss_of_torch(
    kind: Any, examples: Examples, classes: int, smoothing: float
) -> None:
    config = kind.Config(class_weights=WEIGHTS, label_smoothing=smoothing)
    objective = config.of_dataset(NAMES[:classes], None).build(VOCABULARY)
    model = Stub(classes)
    whole = as_tensors(objective.collate(examples, 8))
    given = torch.tensor([WEIGHTS.get(name, 1.0) for name in NAMES[:classes]])
    logits = model.scores(whole["tokens"], whole.get("predicted")).flatten(0, 1)
    expected = F.cross_entropy(
        logits, whole["labels"].flatten(), given, ignore_index=-1, label_smoothing=smoothing
    )
    expected.backward()
    gradient = model.table.grad
    model.zero_grad()

    parts = [as_tensors(objective.collate(only(examples, rows), 8)) for rows in ([1], [2, 0])]
    (name,) = objective.weights(whole)
    total = sum(objective.weights(part)[name] for part in parts)
    assert total == pytest.approx(objective.weights(whole)[name])
    losses = [objective.loss(model, part, {name: torch.tensor(total)}) for part in parts]
    loss = sum(each.total for each in losses)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.table.grad, gradient)
    sums = [torch.stack(each.metrics["loss"]) for each in losses]
    value, weight = sum(sums)
    torch.testing.assert_close(value / weight, expected.detach())
    # Accuracy counts each row once.
    rows = int((whole["labels"] >= 0).sum())
    assert sum(float(each.metrics["accuracy"][1]) for each in losses) == rows


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    counts = [6, 1, 3]
    config = classification.Config(class_weights="balanced")
    found = config.of_dataset(NAMES[:3], lambda: counts)
    labels = np.repeat(np.arange(3), counts)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert isinstance(found.class_weights, InOrder)
    assert list(found.class_weights) == ["a", "b", "c"]
    np.testing.assert_allclose(list(found.class_weights.values()), expected)
    # A run stores them, and whoever reads its settings again gets the same objective.
    stored = decode(classification.Config, to_tree(found), "objective")
    assert stored.of_dataset(NAMES[:3], None) == found
    with pytest.raises(ConfigError, match="no training row has b"):
        config.of_dataset(NAMES[:3], lambda: [1, 0, 3])


def test_weights_come_in_the_order_of_the_labels() -> None:
    found = tagging.Config(class_weights=WEIGHTS).of_dataset(NAMES, None)
    assert list((found.class_weights or {}).items()) == [
        ("a", 1.5), ("b", 2.5), ("c", 0.25), ("d", 1.0),
    ]  # fmt: skip
    # Without a dataset, which label is which is unknown.
    with pytest.raises(ConfigError, match="knows no dataset"):
        ClassLoss(tagging.Config(class_weights=WEIGHTS))(torch.zeros(1, 3), torch.tensor([0]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: classification.Config(class_weights={"z": 1.0}).of_dataset(NAMES, None),
            "class_weights has z, and the labels of the dataset are a, b, c, d",
        ),
        (lambda: classification.Config(class_weights={"a": -1.0}), "class_weights.a is -1.0"),
        (lambda: tagging.Config(class_weights={"a": float("nan")}), "class_weights.a is nan"),
        (lambda: tagging.Config(label_smoothing=1.0), "label_smoothing is 1.0"),
        (lambda: classification.Config(class_weights={"a": 2.0}, soft=True), "soft allows several"),
        (lambda: tagging.Config(class_weights={"a": 2.0}, crf=True), "crf scores sequences"),
        (lambda: tagging.Config(label_smoothing=0.1, crf=True), "crf scores sequences"),
        (
            lambda: distillation.Config("t", classification.Config(class_weights={"a": 2.0})),
            "of.class_weights is set",
        ),
        (
            lambda: sift.Config(classification.Config(class_weights={"a": 2.0})),
            "of.class_weights is set",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
