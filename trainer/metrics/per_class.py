"""Precision, recall and F1 of each class, and which classes are taken for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samestep.config import Tree
from samestep.errors import MissingExtra

MOST_SHOWN = 20
"""Classes up to which the whole confusion matrix is shown, and the number of confusions of more."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassScores:
    """Scores of a class, or their average; 0 where there is nothing to divide by.

    Attributes:
        support: number of rows, or of entities, with this label.
    """

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Confusion:
    """Rows of one label that were predicted as another."""

    label: str
    prediction: str
    count: int


@dataclass(frozen=True)
class ClassReport:
    """Scores of all classes, as `classification_report` of scikit-learn and seqeval have them.

    Attributes:
        classes: by name, in the order of the labels.
        averages: by name: micro (entities only), macro, of the classes that occur, and weighted, by
            support.
        confusion: int64 [C, C], the number of rows of each label (first) and prediction; None for
            entities, of which a predicted one may belong to no true one.
    """

    classes: Mapping[str, ClassScores]
    averages: Mapping[str, ClassScores]
    confusion: Int64 | None = None

    def largest(self) -> list[Confusion]:
        """The most frequent confusions, at most `MOST_SHOWN`."""
        if self.confusion is None:
            return []
        names, wrong = (
            list(self.classes),
            self.confusion * (1 - np.eye(len(self.classes), dtype=int)),
        )
        # Flat indices of the matrix: 5 of 3 classes is row 1, column 2. Equal counts stay in order.
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_SHOWN].tolist()
        pairs = [divmod(place, len(names)) for place in order]
        return [Confusion(names[i], names[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j]]

    def tree(self) -> Tree:
        """As JSON has it: the matrix of up to `MOST_SHOWN` classes, else the largest confusions."""
        tree: Tree = {
            "classes": {name: vars(scores) for name, scores in self.classes.items()},
            "averages": {name: vars(scores) for name, scores in self.averages.items()},
        }
        if self.confusion is not None and len(self.classes) <= MOST_SHOWN:
            tree["confusion"] = self.confusion.tolist()
        elif self.confusion is not None:
            tree["largest_confusions"] = [vars(each) for each in self.largest()]
        return tree


def of_classes(names: Sequence[str], predicted: Int64, true: Int64) -> ClassReport | None:
    """The report of N rows; None if there are none.

    Args:
        names: of the C classes.
        predicted, true: int64 [N], classes.
    """
    if not len(true):
        return None
    count = len(names)
    # A row of label 2 that is predicted as 0 of 3 classes is counted at 2 * 3 + 0, which is row 2,
    # column 0 of the matrix.
    matrix = np.bincount(true * count + predicted, minlength=count**2).reshape(count, count)
    # Sums over a row count its label, and sums over a column its prediction.
    # Of [[5, 1], [2, 4]], supports are 6 and 6, and 7 and 5 are predicted.
    right, support, guessed = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = _ratio(right, guessed), _ratio(right, support)
    # 2 P R / (P + R) = 2 right / (guessed + support)
    f1 = _ratio(2 * right, guessed + support)
    columns = np.stack((precision, recall, f1))
    # Classes that are neither true nor predicted have no score that an average could use.
    occurs = (support + guessed) > 0
    total = int(support.sum())
    averages = {
        "macro": _scores(columns[:, occurs].mean(axis=1), total),
        # [3, C] @ [C]: each score's sum over the classes, weighted by their rows.
        "weighted": _scores(columns @ support / total, total),
    }
    each = zip(names, columns.T, support.tolist(), strict=True)
    return ClassReport({name: _scores(*row) for name, *row in each}, averages, matrix)


def of_entities(predicted: Sequence[list[str]], true: Sequence[list[str]]) -> ClassReport | None:
    """The report of entities by type, as seqeval counts them; None if there are no entities.

    Args:
        predicted, true: for each text, the tags of its words.

    Raises:
        MissingExtra: seqeval is not installed.
    """
    try:
        from seqeval.metrics import classification_report
    except ImportError:
        raise MissingExtra("seqeval", "tasks", "scores of each kind of entity") from None
    # seqeval divides by the number of entities, and cannot average none.
    if all(tag == "O" for tags in (*predicted, *true) for tag in tags):
        return None
    found = classification_report(true, predicted, output_dict=True, zero_division=0)
    names = ("precision", "recall", "f1-score")
    # Averages are rows of seqeval's report, beside the kinds of entities.
    scores = {
        kind: _scores([row[name] for name in names], row["support"]) for kind, row in found.items()
    }
    averages = {name: f"{name} avg" for name in ("micro", "macro", "weighted")}
    return ClassReport(
        {name: row for name, row in scores.items() if name not in averages.values()},
        {name: scores[key] for name, key in averages.items()},
    )


def _scores(values: Sequence[float] | npt.NDArray[np.float64], support: int) -> ClassScores:
    precision, recall, f1 = map(float, values)
    return ClassScores(precision, recall, f1, int(support))


def _ratio(numerator: Int64, denominator: Int64) -> npt.NDArray[np.float64]:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
