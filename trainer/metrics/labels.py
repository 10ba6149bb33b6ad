"""Scores of predicted classes and numbers, as scikit-learn and scipy compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.errors import ConfigError, MissingExtra

Array: TypeAlias = npt.NDArray[np.number]
Metric: TypeAlias = Callable[[Array, Array], float]


def accuracy(predicted: Array, true: Array) -> float:
    """The share of rows that are right."""
    return float((predicted == true).mean())


def f1(predicted: Array, true: Array) -> float:
    """F1 of class 1 against all others: of what is positive in tasks of two classes, as MRPC and QQP."""
    return float(_sklearn("f1").f1_score(true == 1, predicted == 1, zero_division=0))


def macro_f1(predicted: Array, true: Array) -> float:
    """The mean of the F1 of each class that is predicted or true somewhere (CB)."""
    return float(_sklearn("macro_f1").f1_score(true, predicted, average="macro", zero_division=0))


def matthews(predicted: Array, true: Array) -> float:
    """Matthews' correlation (CoLA), in [-1, 1]; 0 where one class is all that is predicted, or true."""
    return float(_sklearn("matthews").matthews_corrcoef(true, predicted))


def pearson(predicted: Array, true: Array) -> float:
    """Pearson's correlation (STS-B), in [-1, 1]."""
    return _correlation("pearson", predicted, true)


def spearman(predicted: Array, true: Array) -> float:
    """Spearman's rank correlation (STS-B), in [-1, 1]."""
    return _correlation("spearman", predicted, true)


def group_exact_match(predicted: Array, true: Array, groups: Sequence[str]) -> float:
    """The share of groups of which all rows are right: MultiRC's EM, where a group is the answers of a question."""
    names, group = _groups("group_exact_match", groups)
    wrong = np.bincount(group, weights=predicted != true, minlength=names.size)
    return float((wrong == 0).mean())


def group_first_right(certainty: Array, true: Array, groups: Sequence[str]) -> float:
    """The share of groups whose row of the greatest certainty is of class 1: of ReCoRD's entities for a query."""
    names, group = _groups("group_first_right", groups)
    order = np.lexsort((certainty, group))  # the last row of each group is its surest
    return float((true[order][np.cumsum(np.bincount(group)) - 1] == 1).sum() / names.size)


def _groups(metric: str, groups: Sequence[str]) -> tuple[Array, Array]:
    """The names of the groups, and the number of each row's."""
    if not all(groups):
        raise ConfigError(
            f"{metric} needs rows with a group; set source.group to the column, and build again"
        )
    names, group = np.unique(np.array(groups), return_inverse=True)
    return names, group


_METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def scores(
    names: Sequence[str],
    predicted: Array,
    true: Array,
    groups: Sequence[str] = (),
    certainty: Array | None = None,
) -> dict[str, float]:
    """Metrics of N rows by name; none where there are no rows.

    Args:
        names: of metrics.
        predicted, true: [N], int for classes, float for numbers.
        groups: of the rows, where metrics are of groups.
        certainty: [N], how sure class 1 is, where metrics compare the rows of a group; None takes `predicted`.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    if not len(true):
        return {}
    of_groups = {
        "group_exact_match": lambda: group_exact_match(predicted, true, groups),
        "group_first_right": lambda: group_first_right(
            predicted if certainty is None else certainty, true, groups
        ),
    }
    return {
        name: of_groups[name]() if name in of_groups else _METRICS[name](predicted, true)
        for name in names
    }


def _correlation(name: str, x: Array, y: Array) -> float:
    try:
        from scipy import stats
    except ImportError:
        raise MissingExtra("scikit-learn", "tasks", f"the metric {name}") from None
    # A model that says the same of all rows, as it may at first, has a correlation of 0 / 0: it knows nothing, so 0.
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float((stats.pearsonr if name == "pearson" else stats.spearmanr)(x, y).statistic)


def _sklearn(name: str) -> ModuleType:
    try:
        import sklearn.metrics
    except ImportError:
        raise MissingExtra("scikit-learn", "tasks", f"the metric {name}") from None
    found: ModuleType = sklearn.metrics
    return found
