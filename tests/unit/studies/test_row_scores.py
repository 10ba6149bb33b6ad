"""Scores as functions of sums over rows, against the libraries that compute them from rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.errors import DataError
from trainer.studies.row_scores import read_row_score

RANDOM = np.random.Generator(np.random.PCG64(3))


def written(rows: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "predictions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def weights(counts: np.ndarray) -> np.ndarray:
    return counts.astype(float)[None]


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [
        ("accuracy", "accuracy_score", {}),
        ("f1", "f1_score", {"pos_label": "yes"}),
        ("matthews", "matthews_corrcoef", {}),
    ],
)
def test_classes(name: str, function: str, options: dict[str, str], tmp_path: Path) -> None:
    from sklearn import metrics

    reference = partial(getattr(metrics, function), **options)
    true, predicted = (RANDOM.choice(["no", "yes"], 60) for _ in range(2))
    rows = [
        {"label": str(a), "prediction": str(b), "probabilities": {"no": 0.5, "yes": 0.5}}
        for a, b in zip(true, predicted, strict=True)
    ]
    score = read_row_score(written(rows, tmp_path), name)
    assert score is not None
    assert score.value == pytest.approx(reference(true, predicted))
    counts = RANDOM.multinomial(60, np.full(60, 1 / 60))
    sample = np.repeat(np.arange(60), counts)
    expected = reference(true[sample], predicted[sample])
    assert score.resampled(weights(counts)) == pytest.approx([expected])


def test_the_accuracy_of_a_group(tmp_path: Path) -> None:
    """A sample without a row of the group has no accuracy, which counts as 0."""
    rows = [
        {"label": "a", "prediction": said, "group": group}
        for said, group in zip("aabb", ("x", "y", "y", "x"), strict=True)
    ]
    score = read_row_score(written(rows, tmp_path), "accuracy.y")
    assert score is not None
    assert score.value == 0.5
    samples = np.array([[1.0, 2, 0, 1], [1, 0, 3, 0], [4, 0, 0, 0]])
    assert score.resampled(samples).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_numbers(name: str, tmp_path: Path) -> None:
    from scipy import stats

    reference = getattr(stats, f"{name}r")
    true = RANDOM.normal(3, 1, 80)
    predicted = true + RANDOM.normal(0, 1, 80)
    rows = [
        {"label": float(a), "prediction": float(b)} for a, b in zip(true, predicted, strict=True)
    ]
    score = read_row_score(written(rows, tmp_path), name)
    assert score is not None
    assert score.value == pytest.approx(reference(true, predicted).statistic)


def test_tags(tmp_path: Path) -> None:
    from seqeval.metrics import f1_score

    tags = ["O", "O", "B-PER", "I-PER", "B-LOC"]
    rows = [
        {
            "words": ["x"] * 8,
            "label": list(map(str, RANDOM.choice(tags, 8))),
            "prediction": list(map(str, RANDOM.choice(tags, 8))),
        }
        for _ in range(40)
    ]
    score = read_row_score(written(rows, tmp_path), "entity_f1")
    assert score is not None
    expected = f1_score([row["label"] for row in rows], [row["prediction"] for row in rows])
    assert score.value == pytest.approx(expected)


def test_answers(tmp_path: Path) -> None:
    rows = [
        {"prediction": "the cat", "answers": ["a cat", "dog"]},
        {"prediction": "big dog", "answers": ["dog"]},
        {"prediction": "", "answers": []},
    ]
    file = written(rows, tmp_path)
    exact, overlap = read_row_score(file, "exact_match"), read_row_score(file, "f1")
    assert exact is not None
    assert overlap is not None
    assert exact.value == pytest.approx(2 / 3)
    assert overlap.value == pytest.approx((1 + 2 / 3 + 1) / 3)


def test_scores_that_are_no_sums_over_rows_have_none(tmp_path: Path) -> None:
    rows = [{"label": "a", "prediction": "a", "probabilities": {"a": 0.4, "b": 0.3, "c": 0.3}}]
    file = written(rows, tmp_path)
    assert read_row_score(file, "accuracy") is not None
    assert read_row_score(file, "macro_f1") is None
    assert read_row_score(file, "f1") is None  # three classes have no positive one
    assert read_row_score(written([], tmp_path), "accuracy") is None


def test_a_label_without_a_probability_is_an_error_of_the_file(tmp_path: Path) -> None:
    row = {"label": "c", "prediction": "a", "probabilities": {"a": 0.5, "b": 0.5}}
    with pytest.raises(DataError, match=r"predictions.jsonl has no probability of the label 'c'"):
        read_row_score(written([row], tmp_path), "f1")
