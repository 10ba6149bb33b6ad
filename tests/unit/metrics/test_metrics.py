"""Scores of predictions equal those of scikit-learn, scipy and seqeval, or of the papers."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from samestep.errors import ConfigError, MissingExtra
from samestep.tasks import TASKS
from trainer.metrics import check_installed, check_names, entities, labels, squad


def score(name: str, predicted: np.ndarray, true: np.ndarray) -> float:
    return labels.scores((name,), predicted, true)[name]


def test_metrics_of_classes_by_hand() -> None:
    predicted, true = np.array([0, 1, 1, 2, 1, 0]), np.array([0, 1, 2, 2, 0, 1])
    names = ("accuracy", "f1", "macro_f1")
    assert labels.scores(names, predicted, true) == pytest.approx(
        {"accuracy": 3 / 6, "f1": 2 / 5, "macro_f1": (1 / 2 + 2 / 5 + 2 / 3) / 3}
    )
    # Two classes: 3 true positives, 1 false one, 2 true negatives, no false one.
    predicted, true = np.array([1, 1, 1, 1, 0, 0]), np.array([1, 1, 1, 0, 0, 0])
    assert labels.scores(("matthews", "f1"), predicted, true) == pytest.approx(
        {"matthews": 6 / np.sqrt(4 * 3 * 3 * 2), "f1": 6 / 7}
    )


def test_metrics_of_numbers_by_hand() -> None:
    true = np.array([1.0, 2.0, 3.0, 4.0])
    assert score("pearson", 2 * true + 1, true) == pytest.approx(1)
    assert score("pearson", true**3, true) < 0.97
    assert score("spearman", true**3, true) == pytest.approx(1)
    assert score("spearman", -(true**3), true) == pytest.approx(-1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("names", [TASKS["regression"].metrics, ("f1", "macro_f1", "matthews")])
def test_constant_predictions_have_a_score(names: tuple[str, ...]) -> None:
    true = np.array([1, 0, 1, 2])
    for constant in (np.zeros(4, int), np.full(4, 3)):
        found = labels.scores(names, constant, true)
        assert all(0 <= value < 0.3 for value in found.values())
    assert labels.scores(names, true[:0], true[:0]) == {}


def test_a_group_is_right_if_all_its_rows_are() -> None:
    predicted, true = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 0, 1])
    groups = ["q1", "q2", "q1", "q3", "q2"]
    assert labels.scores(("group_exact_match",), predicted, true, groups) == {
        "group_exact_match": 2 / 3
    }


def test_the_most_certain_row_of_a_group_answers_for_it() -> None:
    certainty, true = np.array([0.1, -3.0, 2.0, -1.0, -2.0]), np.array([0, 0, 1, 1, 0])
    groups = ["q1", "q2", "q1", "q2", "q3"]
    found = labels.scores(("group_first_right",), certainty > 0, true, groups, certainty)
    assert found == {"group_first_right": 2 / 3}


def test_unknown_metrics_are_rejected() -> None:
    with pytest.raises(
        ConfigError,
        match=r"metrics has bleu\. Use some of accuracy, f1, macro_f1, matthews, group_exact",
    ):
        check_names(("f1", "bleu"), TASKS["classification"].metrics)


@pytest.mark.parametrize(
    ("package", "score"),
    [
        ("sklearn", lambda: score("f1", np.ones(2), np.ones(2))),
        ("scipy", lambda: score("pearson", np.arange(2.0), np.arange(2.0))),
        (
            "seqeval.metrics.sequence_labeling",
            lambda: entities.scores(["entity_f1"], [["O"]], [["O"]]),
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, score: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install .scikit-learn>="):
        score()
    assert labels.scores(("accuracy",), np.ones(2), np.ones(2)) == {"accuracy": 1.0}  # needs none


@pytest.mark.filterwarnings("error")
def test_packages_are_checked_before_there_is_anything_to_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_installed(
        (*TASKS["classification"].metrics, *TASKS["regression"].metrics, *entities.METRICS)
    )
    for package in ("sklearn", "scipy", "seqeval.metrics.sequence_labeling"):
        monkeypatch.setitem(sys.modules, package, None)
    check_installed(("accuracy", "group_exact_match"))  # needs none
    for name in ("f1", "pearson", "entity_f1"):
        with pytest.raises(MissingExtra, match=f"the metric {name} needs .*pip install 'scikit-"):
            check_installed(("accuracy", name))


def test_an_entity_needs_the_right_words_and_type() -> None:
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    predicted = [
        ["B-PER", "I-PER", "O", "B-ORG"],
        ["I-ORG", "I-ORG"],
    ]  # right; another type; another word with it
    found = entities.scores(entities.METRICS, predicted, true)
    assert found == pytest.approx(
        {"entity_precision": 1 / 3, "entity_recall": 1 / 3, "entity_f1": 1 / 3}
    )
    begun = entities.scores(
        ["entity_f1"], [["O", "I-ORG"]], [["O", "B-ORG"]]
    )  # as conlleval reads it
    assert begun == {"entity_f1": 1.0}


# Scores by the official script of SQuAD 2.0.
ANSWERS = [
    ("The Eiffel Tower!", "eiffel tower", 1, 1.0),
    ("in  the\tU.S.A.", "USA", 0, 2 / 3),
    ("theory of a man", "theory man", 0, 0.8),
    ("another", "other", 0, 0.0),
    ("a", "the", 1, 1.0),
    ("", "word", 0, 0.0),
    ("", "", 1, 1.0),
    ("the", "word", 0, 0.0),
    ("1,000 km", "1000km", 0, 0.0),
    ("1,000", "1000", 1, 1.0),
    ("Été à Paris", "été Paris", 0, 0.8),
    ("“quoted”", "quoted", 0, 0.0),  # only ASCII punctuation is removed
    ("co-op the-end", "coop theend", 1, 1.0),
    ("an_a", "ana", 1, 1.0),
    ("x x y", "x y y", 0, 2 / 3),
    ("東京 a 東京", "東京", 0, 2 / 3),
    ("one\u00a0two\u200bthree", "one two\u200bthree", 1, 1.0),
    ("İstanbul", "istanbul", 0, 0.0),
]


@pytest.mark.parametrize(("prediction", "answer", "exact", "f1"), ANSWERS)
def test_answers_are_compared_as_in_squad(
    prediction: str, answer: str, exact: float, f1: float
) -> None:
    assert squad.exact_match(prediction, answer) == squad.exact_match(answer, prediction) == exact
    assert squad.f1(prediction, answer) == squad.f1(answer, prediction) == pytest.approx(f1)


def test_the_closest_answer_counts_and_none_is_an_answer() -> None:
    scores = squad.raw_scores(
        ["big red dog", "dog", "", ""], [["dog", "the red dog"], [], [], ["the", "dog"]]
    )
    assert scores.exact.tolist() == [0, 0, 1, 0]
    assert scores.f1 == pytest.approx([0.8, 0, 1, 0])
    assert scores.has_answer.tolist() == [True, False, False, True]
    assert scores.means() == pytest.approx({"exact_match": 0.25, "f1": 0.45})
    refused = scores.without(np.array([True, True, False, False]))
    assert refused.means_by_kind() == pytest.approx(
        {
            "exact_match": 0.5,
            "f1": 0.5,
            "has_answer_exact_match": 0.0,
            "has_answer_f1": 0.0,
            "no_answer_accuracy": 1.0,
        }
    )


def test_no_threshold_is_better_than_the_best_one() -> None:
    draw = np.random.default_rng(0)
    for case in range(40):
        size = int(draw.integers(1, 40))
        has_answer, says_answer = draw.random((2, size)) < 0.6
        f1 = np.where(has_answer, draw.integers(0, 5, size) / 4, ~says_answer)
        scores = squad.Scores(f1 == 1, f1, has_answer, says_answer)
        doubt = draw.normal(size=size) + (2 if case % 3 else -2)
        best, threshold = squad.best_threshold(f1, scores, doubt)
        assert scores.without(doubt > threshold).f1.mean() == pytest.approx(best)
        every = [scores.without(doubt > t).f1.mean() for t in (-np.inf, *doubt)]
        assert best == pytest.approx(max(every))
