"""Scores of tagged entities, as seqeval computes them."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.errors import MissingExtra
from samestep.tasks import TASKS

METRICS = TASKS["tagging"].metrics


def scores(
    names: Sequence[str],
    predicted: Sequence[list[str]],
    true: Sequence[list[str]],
) -> dict[str, float]:
    """Metrics of entities over all texts, by name.

    An entity is right if both its words and its type are. Entities are read as by CoNLL's
    conlleval, seqeval's default: an I-X that follows no X begins one.

    Args:
        names: of metrics.
        predicted, true: for each text, the tags of its words.

    Raises:
        MissingExtra: seqeval is not installed.
    """
    if not (names and true):
        return {}
    try:
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support
    except ImportError:
        raise MissingExtra("seqeval", "tasks", f"the metric {names[0]}") from None
    found = precision_recall_fscore_support(true, predicted, average="micro", zero_division=0)
    by_name = dict(zip(METRICS, found, strict=False))  # precision, recall, F1, and a count
    return {name: float(by_name[name]) for name in names}
