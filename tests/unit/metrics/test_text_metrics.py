"""Scores of generated texts: a text that is no label or number is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.inference import evaluate_cli
from trainer.metrics import texts

LABELS = ("no", "yes")
REFERENCES = ["yes", "yes", "no", "no", "yes"]


@pytest.mark.parametrize("name", texts.METRICS)
def test_right_texts_have_the_best_score(name: str):
    prose = name.startswith(texts.PERCENT)
    if prose:
        pytest.importorskip("rouge_score" if name.startswith("rouge") else "sacrebleu")
    references = ["1.0", "2.5", "4.0"] if name in TASKS["regression"].metrics else REFERENCES
    references = ["A cat sat on the mat.", "A dog ran over the hills."] if prose else references
    assert texts.build(name, LABELS)(references, references) == pytest.approx(100 if prose else 1)


def test_a_text_that_is_no_label_is_wrong_in_every_metric():
    written = ["yes", "maybe", " no ", "", "yes"]
    wrong = ["yes", "no", "no", "yes", "yes"]
    for name in ("f1", "macro_f1", "matthews"):
        metric = texts.build(name, LABELS)
        assert metric(written, REFERENCES) == pytest.approx(metric(wrong, REFERENCES))
    assert texts.build("accuracy")(written, REFERENCES) == pytest.approx(3 / 5)
    assert texts.unknown_labels(written, LABELS) == ["maybe", ""]
    with pytest.raises(
        ConfigError, match=r"f1 needs labels, and source\.labels of the dataset names none"
    ):
        texts.build("f1")


def test_a_text_that_is_no_number_counts_as_minus_one():
    found = texts.build("pearson")(["1.0", "none", "3", "nan"], ["1", "2", "3", "4"])
    assert found == pytest.approx(np.corrcoef([1, -1, 3, -1], [1, 2, 3, 4])[0, 1])


def test_bleu_may_split_words_as_the_t5_paper_does():
    sacrebleu = pytest.importorskip("sacrebleu")
    written, reference = ["Er sagte: „Das Haus ist groß“."], ["Er sagte: Das Haus ist groß."]
    found = texts.build("bleu_intl")(written, reference)
    assert found == pytest.approx(
        sacrebleu.corpus_bleu(written, [reference], tokenize="intl").score
    )
    assert found > texts.build("bleu")(written, reference)


def test_lines_are_sentences_in_rouge_lsum():
    pytest.importorskip("rouge_score")
    written, reference = ["a cat sat\na dog ran"], ["a dog ran\na cat sat"]
    assert texts.build("rouge_lsum")(written, reference) == pytest.approx(100)
    assert texts.build("rouge_l")(written, reference) < 100


def test_the_command_names_all_metrics():
    assert evaluate_cli._METRICS == texts.METRICS
