"""The score of a model that gives the same answer to every row, below which a run is degenerate."""

from __future__ import annotations

from typing import Any

import numpy as np

from data_pipeline.reading.dataset import Dataset
from trainer.inference.scores import heldout_pairs
from trainer.metrics import labels as label_metrics
from trainer.metrics import squad, texts
from trainer.objectives.task_rows import label_of
from trainer.tasks import TASKS


def chance(objective: Any, dataset: Dataset, score: str) -> float:
    """Returns the best score of a constant answer on the held-out rows.

    The answer is one label or choice, or "no answer" where questions may have none. Tags and
    numbers have no such answer: the result is 0.

    Args:
        objective: of the task; with generated texts, any.
        dataset: of the task.
        score: one of its metrics.
    """
    task = dataset.manifest.task
    if task is None:
        labels = tuple(dataset.manifest.source.get("labels", ()))
        metric = texts.build(score, labels)
        references = [target for _, target in heldout_pairs(dataset)]
        return max((metric([label] * len(references), references) for label in labels), default=0.0)
    rows = dataset.rows("heldout")
    answer = TASKS[task.kind].constant_answer
    if answer == "none" and objective.config.impossible:
        scores = squad.raw_scores([""] * len(rows), [row.answers for row in rows]).means_by_kind()
        # The best threshold of a constant prediction is any that gives it.
        return scores.get(score.removeprefix("best_"), 0.0)
    if answer not in ("label", "choice"):
        return 0.0
    # Trying every label covers the metrics for which the most frequent one is not the best: the
    # F1 of a rare positive class is higher with all rows positive.
    true = np.array([int(label_of(row)) for row in rows])
    groups = [row.group for row in rows]
    answers = len(task.labels) if answer == "label" else len(rows[0].texts) - 1
    found = (
        label_metrics.scores([score], np.full(len(rows), number), true, groups)
        for number in range(answers)
    )
    return max(scores[score] for scores in found)
