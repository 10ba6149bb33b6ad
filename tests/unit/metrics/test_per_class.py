"""Scores of each class equal scikit-learn's and seqeval's."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from seqeval.metrics import classification_report as entity_report
from sklearn import metrics

from samestep.terminal import Console
from tests.unit.monitoring.test_report import page_of, training, write_run
from trainer.inference.class_tables import tables
from trainer.metrics.per_class import ClassReport, ClassScores, of_classes, of_entities


def rows_of(scores: ClassScores) -> list[float]:
    return [scores.precision, scores.recall, scores.f1, scores.support]


def printed(report: ClassReport) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table in tables(report):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str) -> set[tuple[str, ...]]:
    return {tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in text.splitlines()}


def test_classes_are_scored_as_by_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    names = ("no", "maybe", "yes", "never")  # the last one does not occur
    true, predicted = draw.integers(0, 3, 200), draw.integers(0, 2, 200)
    report = of_classes(names, predicted, true)
    assert report is not None
    expected = metrics.classification_report(
        true, predicted, target_names=names[:3], output_dict=True, zero_division=0
    )
    columns = ("precision", "recall", "f1-score", "support")
    for name in names[:3]:
        found = rows_of(report.classes[name])
        np.testing.assert_allclose(found, [expected[name][column] for column in columns])
    for name, average in report.averages.items():
        of_average = [expected[f"{name} avg"][column] for column in columns]
        np.testing.assert_allclose(rows_of(average), of_average)
    assert rows_of(report.classes["never"]) == [0, 0, 0, 0]
    np.testing.assert_array_equal(
        report.confusion, metrics.confusion_matrix(true, predicted, labels=range(4))
    )
    shown = cells(printed(report))
    counts = report.tree()["confusion"][1]
    assert ("maybe", *map(str, counts)) in shown
    assert ("maybe", *(f"{x:.4f}" for x in rows_of(report.classes["maybe"])[:3]),
            str(sum(counts))) in shown  # fmt: skip
    assert of_classes(names, predicted[:0], true[:0]) is None


def test_of_many_classes_the_largest_confusions_are_shown() -> None:
    names = tuple(f"c{i}" for i in range(21))
    true, predicted = np.arange(21).repeat(3), np.arange(21).repeat(3)
    predicted[:2] = 7, 7
    predicted[-1] = 2
    report = of_classes(names, predicted, true)
    assert report is not None
    tree = report.tree()
    assert "confusion" not in tree
    assert tree["largest_confusions"] == [
        {"label": "c0", "prediction": "c7", "count": 2},
        {"label": "c20", "prediction": "c2", "count": 1},
    ]
    text = printed(report)
    assert ("c0", "c7", "2") in cells(text)
    assert "Confusion matrix" not in text


def test_entities_are_scored_as_by_seqeval() -> None:
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-ORG"], ["O", "B-PER"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "B-LOC", "O"], ["O", "B-PER"]]
    report = of_entities(predicted, true)
    assert report is not None
    expected = entity_report(true, predicted, output_dict=True, zero_division=0)
    columns = ("precision", "recall", "f1-score", "support")
    found = {**report.classes, **{f"{name} avg": row for name, row in report.averages.items()}}
    assert found.keys() == expected.keys()
    for name, row in found.items():
        np.testing.assert_allclose(rows_of(row), [expected[name][column] for column in columns])
    assert list(report.classes) == ["LOC", "ORG", "PER"]
    assert "confusion" not in report.tree()
    assert of_entities([["O"]], [["O"]]) is None


@pytest.mark.parametrize("damaged", [False, True])
def test_the_page_has_the_scores_of_the_newest_evaluation(tmp_path: Path, damaged: bool) -> None:
    report = of_classes(("</script>", "b"), np.array([0, 1]), np.array([0, 0]))
    assert report is not None
    run = write_run(tmp_path / "run", training(range(10, 30, 10)), [0.0])
    stored = {"step": 20, "of": "data", **report.tree()}
    if damaged:
        stored["confusion"] = "x"
    (tmp_path / "run" / "classes.json").write_text(json.dumps(stored))
    page, data = page_of([run], tmp_path)
    (of_run,) = data["runs"]
    assert of_run["classes"] == (None if damaged else stored)
    assert "</script>:" not in page
