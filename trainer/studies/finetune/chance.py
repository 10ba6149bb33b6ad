"""Scores of a model that gives the same answer to every row, and how far chance takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_pipeline.reading.dataset import Dataset
from samestep.tasks import TASKS
from trainer.inference.scores import heldout_pairs
from trainer.metrics import labels as label_metrics
from trainer.metrics import squad, texts
from trainer.objectives.task_rows import label_of

_Z = 1.959964  # quantile of the normal distribution for 95 %, two-sided
_CORRELATIONS = ("matthews", "pearson", "spearman")


def constant_scores(objective: Any, dataset: Dataset, scores: Sequence[str]) -> dict[str, float]:
    """Returns each score of its best constant answer on the held-out rows, by name.

    The answer is one label or choice, or "no answer" where questions may have none. Tags and
    numbers have no such answer: the result is 0.

    Args:
        objective: of the task; with generated texts, any.
        dataset: of the task.
        scores: some of its metrics.
    """
    task = dataset.manifest.task
    if task is None:
        return _of_texts(dataset, scores)
    rows = dataset.rows("heldout")
    answer = TASKS[task.kind].constant_answer
    if answer == "none" and objective.config.impossible:
        found = squad.raw_scores([""] * len(rows), [row.answers for row in rows]).means_by_kind()
        # The best threshold of a constant prediction is any that gives it.
        return {score: found.get(score.removeprefix("best_"), 0.0) for score in scores}
    if answer not in ("label", "choice"):
        return dict.fromkeys(scores, 0.0)
    # Trying every label covers the metrics for which the most frequent one is not the best: the
    # F1 of a rare positive class is higher with all rows positive.
    true = np.array([int(label_of(row)) for row in rows])
    groups = [row.group for row in rows]
    answers = len(task.labels) if answer == "label" else len(rows[0].texts) - 1
    tried = [
        label_metrics.scores(list(scores), np.full(len(rows), number), true, groups)
        for number in range(answers)
    ]
    return {score: max(each[score] for each in tried) for score in scores}


def _of_texts(dataset: Dataset, scores: Sequence[str]) -> dict[str, float]:
    labels = tuple(dataset.manifest.source.get("labels", ()))
    if not labels:
        return dict.fromkeys(scores, 0.0)
    references = [target for _, target in heldout_pairs(dataset)]
    found = {}
    for score in scores:
        metric = texts.build(score, labels)
        best = max(metric([label] * len(references), references) for label in labels)
        found[score] = best / 100 if score.startswith(texts.PERCENT) else best
    return found


def upper_end(score: str, constant: float, rows: int) -> float:
    """Upper end of the 95 % interval of a constant answer's score, over draws of held-out rows.

    A run that scores more has learned something. For fractions of rows it is Wilson's interval
    (1927); for correlations, which a constant answer leaves at 0, 1.96 / sqrt(rows). F1 scores are
    taken for fractions.

    Args:
        score: name of the metric.
        constant: score of the constant answer.
        rows: number of held-out rows.
    """
    if score in _CORRELATIONS:
        return constant + _Z / math.sqrt(rows)
    # Example: 68.4 % of 408 rows. z^2 / n is 0.0094, and the upper end 72.7 %.
    share = _Z**2 / rows
    middle = constant + share / 2
    half = math.sqrt(share * constant * (1 - constant) + share**2 / 4)
    return (middle + half) / (1 + share)
