"""What a task's score is for a model that gives the same answer to every row."""

from __future__ import annotations

from typing import Any

import numpy as np

from data_pipeline.reading.dataset import Dataset
from trainer.errors import ConfigError
from trainer.inference.scores import heldout_pairs
from trainer.metrics import texts
from trainer.objectives import Predictions
from trainer.tasks import TASKS


def chance(objective: Any, dataset: Dataset, score: str) -> float:
    """The best score of a constant answer on the held-out rows: the largest class's, say.

    Where questions may have no answer, it is never to give one. It is 0 where there is no such
    answer, as for tags, or where it scores nothing, as for correlations.

    Args:
        objective: a `trainer.objectives.Task`, or one of pairs of texts, whose answers are labels
            or anything.
        dataset: of the task.
        score: one of its metrics.

    Raises:
        ConfigError: it is none of them.
    """
    if dataset.manifest.task is None:
        return _of_texts(dataset, score)
    if score not in objective.score_names:
        known = ", ".join(objective.score_names) or "none"
        raise ConfigError(f"score is {score!r}, and the objective gives {known}; name one of these")
    task, rows = dataset.manifest.task, dataset.rows("heldout")
    constant_answer = TASKS[task.kind].constant_answer
    if constant_answer == "label":
        answers = len(task.labels)
    elif constant_answer == "choice":
        answers = len(rows[0].texts) - 1
    elif constant_answer == "none" and objective.config.impossible:
        of_kind = {"has_answer_exact_match": 0.0, "has_answer_f1": 0.0, "no_answer_accuracy": 1.0}
        return of_kind.get(score, sum(not row.answers for row in rows) / len(rows))
    else:
        return 0.0
    none = np.zeros(len(rows), dtype=np.int64)
    found: float = max(
        objective.scores(
            Predictions(
                outputs=np.tile(answer, (len(rows), 1)),
                document=np.arange(len(rows)),
                begin=none,
                column=none,
                length=none,
                rows=rows,
                number=np.arange(len(rows)),
                labels=task.labels,
            )
        )[score]
        for answer in np.eye(answers, dtype=np.float32)
    )
    return found


def _of_texts(dataset: Dataset, score: str) -> float:
    """Where answers are texts: to write the same label for every source."""
    labels = tuple(dataset.manifest.source.get("labels", ()))
    metric = texts.build(score, labels)
    if not labels:
        return 0.0
    references = [target for _, target in heldout_pairs(dataset)]
    return max(metric([label] * len(references), references) for label in labels)
