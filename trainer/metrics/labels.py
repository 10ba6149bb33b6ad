"""Scores of predicted classes and numbers, as scikit-learn and scipy compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.errors import ConfigError, MissingExtra

Array: TypeAlias = npt.NDArray[np.number]


def scores(
    names: Sequence[str],
    predicted: Array,
    true: Array,
    groups: Sequence[str] = (),
    certainty: Array | None = None,
) -> dict[str, float]:
    """Metrics of N rows by name; empty where there are no rows.

        accuracy: fraction of rows that are right
        f1: F1 of class 1 against all others, which is the positive one of MRPC and QQP
        macro_f1: mean of the F1 of each class that is predicted or true somewhere (CB)
        matthews: Matthews' correlation (CoLA), in [-1, 1]; 0 if all predictions or all labels are
            of one class
        pearson, spearman: correlations of numbers (STS-B), in [-1, 1]; spearman's is of ranks
        group_exact_match: fraction of groups with no wrong row: MultiRC's EM, where a group is the
            answers of a question
        group_first_right: fraction of groups whose most certain row is of class 1: of ReCoRD's
            entities for a query

    Args:
        names: of metrics.
        predicted, true: [N], int for classes, float for numbers.
        groups: name of each row's group, for metrics of groups.
        certainty: [N], the certainty of class 1, for group_first_right; None takes `predicted`.

    Raises:
        ConfigError: rows have no group, and a metric of groups is asked for.
        MissingExtra: scikit-learn is not installed.
    """
    if not len(true):
        return {}
    found = {}
    for name in names:
        if name.startswith("group"):
            ranking = predicted if certainty is None else certainty
            found[name] = _score_of_groups(name, predicted, true, groups, ranking)
        else:
            found[name] = _score(name, predicted, true)
    return found


def _score(name: str, predicted: Array, true: Array) -> float:
    if name == "accuracy":
        return float((predicted == true).mean())
    try:
        from scipy import stats
        from sklearn import metrics
    except ImportError:
        raise MissingExtra("scikit-learn", "tasks", f"the metric {name}") from None
    if name in ("pearson", "spearman"):
        # Constant predictions, as of a model that has just begun to train, give 0 / 0.
        if np.ptp(predicted) == 0 or np.ptp(true) == 0:
            return 0.0
        correlation = stats.pearsonr if name == "pearson" else stats.spearmanr
        return float(correlation(predicted, true).statistic)
    if name == "f1":
        return float(metrics.f1_score(true == 1, predicted == 1, zero_division=0))
    if name == "macro_f1":
        return float(metrics.f1_score(true, predicted, average="macro", zero_division=0))
    return float(metrics.matthews_corrcoef(true, predicted))


def _score_of_groups(
    name: str,
    predicted: Array,
    true: Array,
    groups: Sequence[str],
    certainty: Array,
) -> float:
    if not all(groups):
        raise ConfigError(
            f"{name} needs rows with a group. Set source.group to the column that names it, and "
            "build the dataset again."
        )
    names, group = np.unique(np.array(groups), return_inverse=True)
    if name == "group_exact_match":
        wrong = np.bincount(group, weights=predicted != true, minlength=names.size)
        return float((wrong == 0).mean())
    # Sorted by group, then certainty, so a group's last row is its most certain one.
    order = np.lexsort((certainty, group))
    last = np.cumsum(np.bincount(group)) - 1
    return float((true[order][last] == 1).sum() / names.size)
