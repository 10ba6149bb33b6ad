"""Scores of tagged entities, as seqeval computes them."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.errors import MissingExtra
from trainer.tasks import TASKS

METRICS = TASKS["tagging"].metrics


def scores(
    names: Sequence[str], predicted: Sequence[list[str]], true: Sequence[list[str]]
) -> dict[str, float]:
    """Metrics of entities over all texts, by name; an entity is right where both its words and its type are.

    What is an entity is as in CoNLL's conlleval, seqeval's default: an I-X that follows no X begins one.

    Args:
        names: of metrics.
        predicted, true: the tags of the words of each text.

    Raises:
        MissingExtra: seqeval is not installed.
    """
    if not (names and true):
        return {}
    try:
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
    except ImportError:
        raise MissingExtra("seqeval", "tasks", f"the metric {names[0]}") from None
    found = precision_recall_fscore_support(
        list(true), list(predicted), average="micro", zero_division=0
    )
    every = dict(zip(METRICS, map(float, found[:3]), strict=True))
    return {name: every[name] for name in names}
