"""Scores of generated texts: of translations and summaries in percent, of answers as shares of the whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from trainer.errors import ConfigError, MissingExtra
from trainer.metrics import labels as of_labels
from trainer.metrics import squad
from trainer.metrics.labels import Array
from trainer.tasks import TASKS

logger = logging.getLogger(__name__)

Metric: TypeAlias = Callable[[Sequence[str], Sequence[str]], float]
"""Of texts and what they should be."""

_OF_CLASSES = ("f1", "macro_f1", "matthews")
_OF_NUMBERS = TASKS["regression"].metrics
_NO_NUMBER = -1.0  # what a text counts as that is none, as in T5's code
METRICS = (
    *("bleu", "bleu_intl", "chrf", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("accuracy", *_OF_CLASSES, *_OF_NUMBERS, "answer_exact_match", "answer_f1"),
)
PERCENT = ("bleu", "chrf", "rouge")
"""What the names of metrics begin with that are percentages."""


def build(name: str, labels: Sequence[str] = ()) -> Metric:
    """A metric by its name.

    Args:
        name: one of METRICS.
        labels: all texts that there should be, in the order of the classes.

    Raises:
        ConfigError: the metric is of classes, and there are no labels.
        MissingExtra: what it needs is not installed.
    """
    if name in ("bleu", "bleu_intl", "chrf"):
        return _sacrebleu(name)
    if name.startswith("rouge_"):
        return _rouge(name)
    if name in ("answer_exact_match", "answer_f1"):
        return _mean_of(squad.f1 if name == "answer_f1" else squad.exact_match)
    if name == "accuracy":
        return _mean_of(lambda text, reference: float(text.strip() == reference.strip()))
    if name in _OF_NUMBERS:
        return lambda texts, references: of_labels.scores(
            (name,), np.array([*map(_number, texts)]), np.array([*map(_number, references)])
        )[name]
    if not labels:
        raise ConfigError(
            f"{name} is of classes, and source.labels of the dataset names none; name them, and build again"
        )
    return lambda texts, references: of_labels.scores(
        (name,), *_classes(texts, references, labels)
    )[name]


def strangers(texts: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The texts that are no label."""
    return [text for text in texts if text.strip() not in labels]


def _classes(
    texts: Sequence[str], references: Sequence[str], labels: Sequence[str]
) -> tuple[Array, Array]:
    """The classes of texts and of what they should be; a text that is no label is of a wrong class, the next."""
    known = {label: number for number, label in enumerate(labels)}
    predicted, true = (
        np.array([known.get(text.strip(), -1) for text in each]) for each in (texts, references)
    )
    return np.where(predicted < 0, (true + 1) % len(labels), predicted), true


def _number(text: str) -> float:
    number = _NO_NUMBER
    with contextlib.suppress(ValueError):
        number = float(text)
    return number if np.isfinite(number) else _NO_NUMBER


def _mean_of(score: Callable[[str, str], float]) -> Metric:
    def mean(texts: Sequence[str], references: Sequence[str]) -> float:
        return sum(map(score, texts, references)) / len(texts)

    return mean


def _sacrebleu(name: str) -> Metric:
    """BLEU or chrF as sacrebleu computes it (Post 2018), with its defaults but for a tokenizer that the name has."""
    try:
        from sacrebleu import metrics
    except ImportError:
        raise MissingExtra("sacrebleu", "text", f"the metric {name}") from None
    kind, _, tokenizer = name.partition("_")
    metric = getattr(metrics, kind.upper())(**({"tokenize": tokenizer} if tokenizer else {}))

    def score(texts: Sequence[str], references: Sequence[str]) -> float:
        result = metric.corpus_score(list(texts), [list(references)])
        logger.info("%s = %.2f, signature %s", result.name, result.score, metric.get_signature())
        return float(result.score)

    return score


def _rouge(name: str) -> Metric:
    """The mean F-measure of a ROUGE in percent, as rouge-score computes it (Lin 2004); it looks at a-z and 0-9 only.

    In rouge_lsum, lines are sentences; a blank, a point and a blank end one, too, as in T5's code, as the tokenizers of
    T5 make blanks of line ends.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingExtra("rouge-score", "text", f"the metric {name}") from None
    kind = name.replace("_l", "L").replace("_", "")
    scorer = RougeScorer([kind])

    def score(text: str, reference: str) -> float:
        if name == "rouge_lsum":
            text, reference = (each.replace(" . ", " .\n") for each in (text, reference))
        return 100 * float(scorer.score(reference, text)[kind].fmeasure)

    return _mean_of(score)
