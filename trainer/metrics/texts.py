"""Scores of generated texts: in percent for translations and summaries, in [0, 1] for answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from samestep.errors import ConfigError, MissingExtra
from samestep.tasks import TASKS
from trainer.metrics import labels as label_metrics
from trainer.metrics import squad
from trainer.metrics.labels import Array

logger = logging.getLogger(__name__)

Metric: TypeAlias = Callable[[Sequence[str], Sequence[str]], float]
"""Scores generated texts against their references."""

_OF_CLASSES = ("f1", "macro_f1", "matthews")
_OF_NUMBERS = TASKS["regression"].metrics
_NOT_A_NUMBER = -1.0  # counts for a text that is no number, as in T5's code
METRICS = (
    *("bleu", "bleu_intl", "chrf", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("accuracy", *_OF_CLASSES, *_OF_NUMBERS, "answer_exact_match", "answer_f1"),
)
PERCENT = ("bleu", "chrf", "rouge")
"""First parts of the names of metrics in percent."""


def build(name: str, labels: Sequence[str] = ()) -> Metric:
    """Builds a metric.

    Args:
        name: one of METRICS.
        labels: the texts that stand for classes, in the order of the classes.

    Raises:
        ConfigError: the metric is of classes, and there are no labels.
        MissingExtra: a package that it needs is not installed.
    """
    if name.startswith("rouge_"):
        return _rouge(name)
    if name.startswith(PERCENT):
        return _sacrebleu(name)
    if name in ("answer_exact_match", "answer_f1"):
        return _mean_of(squad.f1 if name == "answer_f1" else squad.exact_match)
    if name == "accuracy":
        return _mean_of(lambda text, reference: float(text.strip() == reference.strip()))
    if name in _OF_CLASSES and not labels:
        raise ConfigError(
            f"{name} needs labels, and source.labels of the dataset names none. Name them, and "
            "build the dataset again."
        )

    # Metrics of classes and numbers come from scikit-learn and SciPy, as with a task's head.
    def score(texts: Sequence[str], references: Sequence[str]) -> float:
        if name in _OF_CLASSES:
            predicted, true = _classes(texts, references, labels)
        else:
            predicted, true = _numbers(texts), _numbers(references)
        return label_metrics.scores((name,), predicted, true)[name]

    return score


def unknown_labels(texts: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The texts that are no label."""
    return [text for text in texts if text.strip() not in labels]


def _classes(
    texts: Sequence[str],
    references: Sequence[str],
    labels: Sequence[str],
) -> tuple[Array, Array]:
    """The classes of texts and references.

    A text that is no label gets a wrong class, the one after its reference's.
    """
    known = {label: number for number, label in enumerate(labels)}
    predicted = np.array([known.get(text.strip(), -1) for text in texts])
    true = np.array([known.get(text.strip(), -1) for text in references])
    # With labels 0, 1, 2: a text that is no label counts as 2 if 1 is right, and as 0 if 2 is.
    return np.where(predicted < 0, (true + 1) % len(labels), predicted), true


def _numbers(texts: Sequence[str]) -> Array:
    return np.array([_number(text) for text in texts])


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return _NOT_A_NUMBER
    return number if np.isfinite(number) else _NOT_A_NUMBER


def _mean_of(score: Callable[[str, str], float]) -> Metric:
    def mean(texts: Sequence[str], references: Sequence[str]) -> float:
        return sum(map(score, texts, references)) / len(texts)

    return mean


def _sacrebleu(name: str) -> Metric:
    """BLEU or chrF as sacrebleu computes it (Post 2018), with its defaults.

    A name with a second part, as bleu_intl, chooses the tokenizer.
    """
    try:
        from sacrebleu import metrics
    except ImportError:
        raise MissingExtra("sacrebleu", "text", f"the metric {name}") from None
    # "bleu_intl" is BLEU with the tokenizer "intl", "chrf" has none.
    kind, _, tokenizer = name.partition("_")
    metric = getattr(metrics, kind.upper())(**({"tokenize": tokenizer} if tokenizer else {}))

    def score(texts: Sequence[str], references: Sequence[str]) -> float:
        result = metric.corpus_score(list(texts), [list(references)])
        logger.info("%s = %.2f, signature %s", result.name, result.score, metric.get_signature())
        return float(result.score)

    return score


def _rouge(name: str) -> Metric:
    """The mean F-measure of a ROUGE in percent, as rouge-score computes it (Lin 2004).

    It considers a-z and 0-9 only. In rouge_lsum, lines are sentences, and " . " ends one too, as in
    T5's code: T5's tokenizers turn line ends into blanks.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingExtra("rouge-score", "text", f"the metric {name}") from None
    # rouge_1 -> rouge1, rouge_lsum -> rougeLsum
    kind = name.replace("_l", "L").replace("_", "")
    scorer = RougeScorer([kind])

    def score(text: str, reference: str) -> float:
        if name == "rouge_lsum":
            text, reference = text.replace(" . ", " .\n"), reference.replace(" . ", " .\n")
        return 100 * float(scorer.score(reference, text)[kind].fmeasure)

    return _mean_of(score)
