"""SQuAD's scores, by the rules of its official script, evaluate-v2.0.py (Rajpurkar et al. 2018).

The script evaluate-v1.1.py differs for answers of nothing but punctuation and articles, as "The":
it counts them like any other answer, although they share no word with any.
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
    """The words of an answer in lower case, without ASCII punctuation and articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if both are the same once normalized, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str) -> float:
    """F1 of the words, repeated ones counted; if either has none, 1 if both have none."""
    predicted, true = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not (predicted and true):
        return float(predicted == true)
    # Multiset intersection: "the cat the dog" and "the the" share two words.
    common = sum((Counter(predicted) & Counter(true)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(true)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True)
class Scores:
    """Scores of N predictions.

    Attributes:
        exact, f1: float64 [N], against the closest of the right answers.
        has_answer: bool [N], whether the question has an answer.
        says_answer: bool [N], whether an answer is predicted.
    """

    exact: Float64
    f1: Float64
    has_answer: Bools
    says_answer: Bools

    def without(self, withheld: Bools) -> Scores:
        """The scores if some predictions, bool [N], become "no answer".

        These are right where the question has none.
        """
        right = (~self.has_answer).astype(np.float64)
        return replace(
            self,
            exact=np.where(withheld, right, self.exact),
            f1=np.where(withheld, right, self.f1),
            says_answer=self.says_answer & ~withheld,
        )

    def means(self) -> dict[str, float]:
        """Means of exact_match and f1; empty where there are no predictions."""
        if not self.exact.size:
            return {}
        return {"exact_match": float(self.exact.mean()), "f1": float(self.f1.mean())}

    def means_by_kind(self) -> dict[str, float]:
        """`means`, and separate ones for questions with and without an answer, if there are such.

        For those without, exact_match and f1 are one number: only no answer is right, and any other
        shares no word with it.
        """
        means = self.means()
        if self.has_answer.any():
            means["has_answer_exact_match"] = float(self.exact[self.has_answer].mean())
            means["has_answer_f1"] = float(self.f1[self.has_answer].mean())
        if not self.has_answer.all():
            means["no_answer_accuracy"] = float(self.exact[~self.has_answer].mean())
        return means


def raw_scores(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> Scores:
    """Compares each prediction with the answers of its question; "" is the answer if it has none.

    As in evaluate-v2.0.py, an answer of nothing but punctuation and articles does not count.
    """
    exact, overlap = np.zeros((2, len(predictions)))
    for i, (prediction, right) in enumerate(zip(predictions, answers, strict=True)):
        # Several annotators may have answered; the closest answer counts.
        right = [answer for answer in right if normalize_answer(answer)] or [""]
        exact[i] = max(exact_match(prediction, answer) for answer in right)
        overlap[i] = max(f1(prediction, answer) for answer in right)
    has_answer = np.array([bool(each) for each in answers], dtype=bool)
    says_answer = np.array([bool(each) for each in predictions], dtype=bool)
    return Scores(exact, overlap, has_answer, says_answer)


def best_threshold(raw: Float64, scores: Scores, doubt: Float64) -> tuple[float, float]:
    """The threshold of doubt, above which no answer is predicted, that gives the best mean score.

    This is `find_best_thresh` of evaluate-v2.0.py, with one difference. Where it is best to predict
    no answer for any question, the script returns 0, and predictions with a doubt below 0 would
    still be given; this returns a threshold below every doubt.

    Args:
        raw: float64 [N], `scores.exact` or `scores.f1`.
        scores: of the predictions.
        doubt: float64 [N], how much better "no answer" is than each prediction.

    Returns:
        The best mean, and the threshold.
    """
    # Start with no answers at all, then give them one by one, from the least doubtful on.
    order = np.argsort(doubt, kind="stable")
    # Predicting an answer gains its score, or loses the point of a question that has none.
    gain = np.where(scores.has_answer, raw, -1.0 * scores.says_answer)[order]
    # sums[k]: the k predictions of least doubt are given, and no answer for all others.
    sums = np.cumsum(np.concatenate(([np.count_nonzero(~scores.has_answer)], gain)))
    best = int(sums.argmax())
    # The threshold is the doubt of the last prediction that is still given.
    if best:
        threshold = doubt[order[best - 1]]
    else:
        threshold = min(0.0, np.nextafter(doubt.min(initial=np.inf), -np.inf))
    return float(sums[best] / max(1, len(raw))), float(threshold)
