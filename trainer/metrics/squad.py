"""SQuAD's scores, by the rules of its official script, evaluate-v2.0.py (Rajpurkar et al. 2018).

Those of evaluate-v1.1.py differ where an answer is nothing but punctuation and articles, as "The": there it is an
answer like any other, but shares no word with any.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def normalize_answer(text: str) -> str:
    """The words of an answer, in lower case, without ASCII's punctuation and without articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 where both are the same once normalized, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str) -> float:
    """F1 of the words, each as often as it is there; where either has none, 1 if both have none."""
    predicted, true = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not (predicted and true):
        return float(predicted == true)
    common = sum((Counter(predicted) & Counter(true)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(true)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Scores:
    """Scores of N predictions.

    Attributes:
        exact, f1: float64 [N], against that of the right answers which is closest.
        has_answer: bool [N], whether there is a right answer.
        says_answer: bool [N], whether one is predicted.
    """

    exact: Float64
    f1: Float64
    has_answer: Bools
    says_answer: Bools

    def without(self, refuse: Bools) -> Scores:
        """The same where no answer is predicted for some of them, bool [N]; that is right where there is none."""
        right = (~self.has_answer).astype(np.float64)
        exact, f1 = (np.where(refuse, right, raw) for raw in (self.exact, self.f1))
        return replace(self, exact=exact, f1=f1, says_answer=self.says_answer & ~refuse)

    def means(self) -> dict[str, float]:
        """exact_match and f1; nothing where there are no predictions."""
        return (
            {"exact_match": float(self.exact.mean()), "f1": float(self.f1.mean())}
            if self.exact.size
            else {}
        )

    def means_by_kind(self) -> dict[str, float]:
        """The same, and those of questions with an answer and without, as far as there are such.

        Of those without, exact_match and f1 are one number: no answer is right, and any other shares no word with it.
        """
        means = self.means()
        if self.has_answer.any():
            means["has_answer_exact_match"] = float(self.exact[self.has_answer].mean())
            means["has_answer_f1"] = float(self.f1[self.has_answer].mean())
        if not self.has_answer.all():
            means["no_answer_accuracy"] = float(self.exact[~self.has_answer].mean())
        return means


def raw_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> Scores:
    """Compares each prediction with the answers of its question, of which "" is the only one where there is none.

    As in evaluate-v2.0.py, an answer of nothing but punctuation and articles does not count.
    """
    exact, overlap = np.zeros((2, len(predictions)))
    for i, (prediction, right) in enumerate(zip(predictions, answers, strict=True)):
        right = [answer for answer in right if normalize_answer(answer)] or [""]
        exact[i] = max(exact_match(prediction, answer) for answer in right)
        overlap[i] = max(f1(prediction, answer) for answer in right)
    return Scores(
        exact,
        overlap,
        np.array([*map(bool, answers)], bool),
        np.array([*map(bool, predictions)], bool),
    )


def best_threshold(raw: Float64, scores: Scores, doubt: Float64) -> tuple[float, float]:
    """The threshold with which a score is best when no answer is predicted where the doubt is above it.

    This is `find_best_thresh` of evaluate-v2.0.py, but where it is best to give no answer at all: that says 0 then, and
    some predictions may have a doubt below it.

    Args:
        raw: float64 [N], the score, one of those in `scores`.
        scores: of the predictions.
        doubt: float64 [N], of each prediction.

    Returns:
        The best mean, and the threshold.
    """
    order = np.argsort(doubt, kind="stable")
    gain = np.where(scores.has_answer, raw, -1.0 * scores.says_answer)[order]
    # What the first 0, 1, ... predictions give, and no answer for all others.
    sums = np.cumsum(np.concatenate(([np.count_nonzero(~scores.has_answer)], gain)))
    best = int(sums.argmax())
    threshold = (
        doubt[order[best - 1]]
        if best
        else min(0.0, np.nextafter(doubt.min(initial=np.inf), -np.inf))
    )
    return float(sums[best] / max(1, len(raw))), float(threshold)
