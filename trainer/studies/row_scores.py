"""Scores as functions of sums over held-out rows, so that rows can be resampled.

Example: entity F1 is 2 * true positives / (predicted + real entities), of the sums over rows. A
bootstrap sample gives each row a weight (how often it is in the sample), so all samples are one
matrix product, weights @ rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from samestep.errors import DataError
from samestep.stored_json import JsonError, Measure, checked, parse_json, read_lines
from samestep.untrusted import open_regular
from trainer.metrics import squad

Floats: TypeAlias = NDArray[np.float64]
_Line: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class RowScore:
    """A score of one model.

    Attributes:
        rows: numbers that are summed over rows, [rows, k].
        of_sums: turns sums, [..., k], into scores, [...].
    """

    rows: Floats
    of_sums: Callable[[Floats], Floats]

    def resampled(self, weights: Floats) -> Floats:
        """Returns the score of each sample.

        Args:
            weights: of the rows, [samples, rows].
        """
        return self.of_sums(weights @ self.rows)

    @property
    def value(self) -> float:
        return float(self.of_sums(self.rows.sum(0)))

    def minus(self, other: RowScore) -> RowScore | None:
        """The difference from a score on the same rows; None if it is on another number of rows."""
        if len(self.rows) != len(other.rows):
            return None
        # Both are computed from the same sample of rows, side by side in one matrix.
        own = self.rows.shape[1]

        def of_sums(sums: Floats) -> Floats:
            return self.of_sums(sums[..., :own]) - other.of_sums(sums[..., own:])

        return RowScore(np.hstack([self.rows, other.rows]), of_sums)


def read_row_score(file: Path, name: str) -> RowScore | None:
    """Reads a score from the predictions of a task; None if it is no function of sums over rows.

    Args:
        file: as `samestep evaluate --predictions` writes it.
        name: of the score.
    """
    lines: list[_Line] = []
    kind: Any = None
    try:
        with open_regular(file) as content:
            for line, _, _ in read_lines(content):
                row = parse_json(line, dict[str, object])
                # The first line tells the kind, and the others must be of the same.
                kind = kind if lines else _kind(row)
                lines.append(dict(checked(row, kind)))
    except (OSError, JsonError) as error:
        raise DataError(
            f"{file}, line {len(lines) + 1} is damaged: {error}. Evaluate the model again."
        ) from error
    if not lines:
        return None
    if kind is _Answers:
        return _of_answers(lines, name)
    if kind is _Tags:
        return _of_tags(lines) if name == "entity_f1" else None
    return _of_numbers(lines, name) if kind is _Numbers else _of_classes(lines, name, file)


class _Answers(TypedDict):
    prediction: str
    answers: list[str]


class _Tags(TypedDict):
    words: list[str]
    label: list[str]
    prediction: list[str]


class _Numbers(TypedDict):
    label: float
    prediction: Measure


class _Classes(TypedDict):
    label: str | int
    prediction: str | int
    group: NotRequired[str | None]
    probabilities: NotRequired[dict[str, Measure] | list[Measure]]


def _kind(line: _Line) -> object:
    if "answers" in line:
        return _Answers
    if "words" in line:
        return _Tags
    return _Numbers if isinstance(line.get("label"), float) else _Classes


def _of_answers(lines: Sequence[_Line], name: str) -> RowScore | None:
    if name not in ("exact_match", "f1"):
        return None
    scored = squad.raw_scores(
        [line["prediction"] for line in lines], [line["answers"] for line in lines]
    )
    return _mean_of(scored.exact if name == "exact_match" else scored.f1)


def _of_tags(lines: Sequence[_Line]) -> RowScore:
    from seqeval.metrics.sequence_labeling import get_entities

    counts = []
    for line in lines:
        true, predicted = set(get_entities(line["label"])), set(get_entities(line["prediction"]))
        # F1 = 2 * common / (true + predicted), a function of two sums.
        counts.append((len(true & predicted), len(true) + len(predicted)))
    return RowScore(
        np.array(counts, np.float64),
        lambda sums: _ratio(2 * sums[..., 0], sums[..., 1]),
    )


def _of_numbers(lines: Sequence[_Line], name: str) -> RowScore | None:
    true = np.array([line["label"] for line in lines])
    predicted = np.array([line["prediction"] for line in lines])
    if name == "spearman":
        # Of the ranks among all rows: those within a sample would be no function of sums.
        from scipy.stats import rankdata

        true, predicted = rankdata(true), rankdata(predicted)
    elif name != "pearson":
        return None
    # Correlation does not change by a shift, and differences of large sums lose digits.
    x, y = true - true.mean(), predicted - predicted.mean()
    rows = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)

    def correlation(sums: Floats) -> Floats:
        n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
        return _ratio(n * xy - x * y, np.sqrt((n * xx - x * x) * (n * yy - y * y)))

    return RowScore(rows, correlation)


def _of_classes(lines: Sequence[_Line], name: str, file: Path) -> RowScore | None:
    true, predicted = ([line[key] for line in lines] for key in ("label", "prediction"))
    is_right = np.array([a == b for a, b in zip(true, predicted, strict=True)], float)
    if name == "accuracy":
        return _mean_of(is_right)
    if name.startswith("accuracy."):
        group = name.removeprefix("accuracy.")
        own = np.array([line.get("group") == group for line in lines], float)
        return RowScore(
            np.stack([is_right * own, own], axis=1), lambda sums: _ratio(sums[..., 0], sums[..., 1])
        )
    probabilities = lines[0].get("probabilities")
    if name not in ("f1", "matthews") or not isinstance(probabilities, dict):
        return None
    labels = list(probabilities)
    if len(labels) != 2:
        return None
    if unknown := {*true, *predicted}.difference(labels):
        raise DataError(
            f"{file} has no probability of the label {min(map(str, unknown))!r}. Evaluate the "
            "model again."
        )
    # [true negatives, false positives, false negatives, true positives] of the second label.
    places = [2 * labels.index(a) + labels.index(b) for a, b in zip(true, predicted, strict=True)]
    rows = np.eye(4)[places]

    def f1(sums: Floats) -> Floats:
        return _ratio(2 * sums[..., 3], 2 * sums[..., 3] + sums[..., 1] + sums[..., 2])

    def matthews(sums: Floats) -> Floats:
        tn, fp, fn, tp = np.moveaxis(sums, -1, 0)
        product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
        return _ratio(tp * tn - fp * fn, np.sqrt(product))

    return RowScore(rows, f1 if name == "f1" else matthews)


def _mean_of(values: Floats) -> RowScore:
    rows = np.stack([values, np.ones_like(values)], axis=1)
    return RowScore(rows, lambda sums: _ratio(sums[..., 0], sums[..., 1]))


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where nothing is divided by nothing, as the metrics define it."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
