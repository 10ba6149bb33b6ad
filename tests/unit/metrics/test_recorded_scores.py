"""Scores equal those of the official programs for the predictions in `recorded`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.metrics import entities, labels, squad

RECORDED = Path(__file__).parent / "recorded"
OFFICIAL_NAMES = {
    "exact": "exact_match",
    "f1": "f1",
    "HasAns_exact": "has_answer_exact_match",
    "HasAns_f1": "has_answer_f1",
    "NoAns_exact": "no_answer_accuracy",
    "NoAns_f1": "no_answer_accuracy",
}
ARTICLES = ("a", "an", "the")


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name).read_text(encoding="utf-8"))
    return found


SQUAD = recorded("squad.json")
QUESTIONS = SQUAD["questions"]
DOUBT = np.array([question["null_odds"] for question in QUESTIONS])


def scores_of(questions: list[dict[str, Any]], prediction: str | None = None) -> squad.Scores:
    """Scores of the questions' own predictions, or of one prediction for all."""
    predictions = [
        question["prediction"] if prediction is None else prediction for question in questions
    ]
    return squad.raw_scores(predictions, [question["answers"] for question in questions])


@pytest.mark.parametrize(
    "total", SQUAD["v2.0"], ids=lambda total: f"threshold {total['threshold']}"
)
def test_totals_are_those_of_squads_script(total: dict[str, Any]) -> None:
    threshold = np.inf if total["threshold"] is None else total["threshold"]
    means = scores_of(QUESTIONS).without(threshold < DOUBT).means_by_kind()
    for official, ours in OFFICIAL_NAMES.items():
        assert 100 * means[ours] == pytest.approx(total["printed"][official], rel=1e-12), official


@pytest.mark.parametrize(("official", "score"), [("best_exact", "exact"), ("best_f1", "f1")])
def test_best_thresholds_are_those_of_squads_script(official: str, score: str) -> None:
    scores, printed = scores_of(QUESTIONS), SQUAD["v2.0"][1]["printed"]
    best, threshold = squad.best_threshold(getattr(scores, score), scores, DOUBT)
    assert 100 * best == pytest.approx(printed[official], rel=1e-12)
    assert threshold == printed[f"{official}_thresh"]


def test_if_no_answer_is_best_the_threshold_is_below_every_doubt() -> None:
    """The script returns 0, which gives answers of a doubt below 0; the best score is equal."""
    printed = SQUAD["v2.0, each prediction is 'none of it'"]
    scores = scores_of(QUESTIONS, "none of it")
    for official, raw in (("best_exact", scores.exact), ("best_f1", scores.f1)):
        best, threshold = squad.best_threshold(raw, scores, DOUBT)
        assert 100 * best == pytest.approx(printed[official], rel=1e-12)
        assert printed[f"{official}_thresh"] == 0.0
        assert threshold < DOUBT.min() < 0
        assert 100 * scores.without(threshold < DOUBT).exact.mean() == pytest.approx(
            printed[official], rel=1e-12
        )
    assert scores.without(DOUBT > 0).exact.mean() < best


def test_totals_are_those_of_the_script_of_squad_1_but_for_answers_that_are_articles() -> None:
    """By the rules of 2.0, "The" is no answer: it has no words without articles."""
    answered = [question for question in QUESTIONS if question["answers"]]
    usual = [
        question
        for question in answered
        if not {*map(str.lower, question["answers"])} & {*ARTICLES}
    ]
    assert len(usual) == len(answered) - 2
    printed = SQUAD["v1.1, but those with an answer that is an article"]
    assert {name: 100 * value for name, value in scores_of(usual).means().items()} == pytest.approx(
        printed, rel=1e-12
    )
    means = scores_of(answered).means()
    assert 100 * means["exact_match"] != pytest.approx(
        SQUAD["v1.1, questions with an answer"]["exact_match"]
    )
    assert 100 * means["f1"] == pytest.approx(SQUAD["v2.0"][0]["printed"]["HasAns_f1"], rel=1e-12)


def test_entities_are_those_of_conlleval() -> None:
    found = recorded("entities.json")
    true, predicted = (
        [s[name].split() for s in found["sentences"]] for name in ("true", "predicted")
    )
    scores, printed = entities.scores(entities.METRICS, predicted, true), found["printed"]
    assert scores["entity_precision"] == pytest.approx(printed["correct"] / printed["found"])
    assert scores["entity_recall"] == pytest.approx(printed["correct"] / printed["phrases"])
    assert 100 * scores["entity_f1"] == pytest.approx(printed["FB1"], abs=0.005)


@pytest.mark.parametrize("rows", ["two classes", "three classes"])
def test_scores_of_classes_are_those_recorded(rows: str) -> None:
    found = recorded("classes.json")[rows]
    true, predicted = (np.array([*map(int, found[name])]) for name in ("true", "predicted"))
    expected = {name: value for name, value in found.items() if isinstance(value, float)}
    assert labels.scores([*expected], predicted, true) == pytest.approx(expected, rel=1e-12)


def test_matthews_is_its_definition() -> None:
    found = recorded("classes.json")["two classes"]
    pairs = [*zip(found["true"], found["predicted"], strict=True)]
    tp, tn, fp, fn = (
        pairs.count(pair) for pair in (("1", "1"), ("0", "0"), ("0", "1"), ("1", "0"))
    )
    defined = (tp * tn - fp * fn) / np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["matthews"] == pytest.approx(defined, rel=1e-12)
