"""Kinds of fine-tuning tasks, and what there is to know of each.

A kind has one name: that of its source, of the rows in a dataset, of its objective and, where it has one of its own, of
the model's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

TaskKind: TypeAlias = Literal["classification", "regression", "multiple_choice", "tagging", "question_answering"]

Layout: TypeAlias = Literal["joined", "windows", "choices"]
"""How the texts of a row become sequences:

joined: one sequence of all texts, the longest of which are truncated where they are too long.
windows: one of the last text, behind the first where there are two; what is too long becomes several examples.
choices: a sequence for each text but the first, behind the first, side by side in one example.
"""


@dataclass(frozen=True)
class TaskFacts:
    """What there is to know of a kind of task.

    Attributes:
        head: the head of a model for it; a regression's is a classification head with one label.
        layout: how the texts of a row become sequences.
        labelled: what a label belongs to: the row, each token of its last text, or the first and the last token of a
            span in it.
        metrics: the scores that its objective may have.
        constant_answer: what a model without any knowledge says of every row, which gives the chance level: the same
            label, the same choice, or that there is no answer; None where no such answer scores above 0.
        pipeline: the `pipeline_tag` of the Hugging Face Hub.
        architecture: what the names of its classes in `transformers` end with, as in AutoModelForTokenClassification.
    """

    head: str
    layout: Layout
    labelled: Literal["row", "tokens", "span"]
    metrics: tuple[str, ...]
    constant_answer: Literal["label", "choice", "none"] | None
    pipeline: str
    architecture: str


TASKS: Mapping[TaskKind, TaskFacts] = {
    "classification": TaskFacts(
        head="classification",
        layout="joined",
        labelled="row",
        metrics=("accuracy", "f1", "macro_f1", "matthews", "group_exact_match", "group_first_right"),
        constant_answer="label",
        pipeline="text-classification",
        architecture="SequenceClassification",
    ),
    "regression": TaskFacts(
        head="classification",
        layout="joined",
        labelled="row",
        metrics=("pearson", "spearman"),
        constant_answer=None,
        pipeline="text-classification",
        architecture="SequenceClassification",
    ),
    "multiple_choice": TaskFacts(
        head="multiple_choice",
        layout="choices",
        labelled="row",
        metrics=("accuracy",),
        constant_answer="choice",
        pipeline="multiple-choice",
        architecture="MultipleChoice",
    ),
    "tagging": TaskFacts(
        head="tagging",
        layout="windows",
        labelled="tokens",
        metrics=("entity_precision", "entity_recall", "entity_f1"),
        constant_answer=None,
        pipeline="token-classification",
        architecture="TokenClassification",
    ),
    "question_answering": TaskFacts(
        head="question_answering",
        layout="windows",
        labelled="span",
        metrics=(
            *("exact_match", "f1"),
            *("has_answer_exact_match", "has_answer_f1", "no_answer_accuracy", "best_exact_match", "best_f1"),
        ),
        constant_answer="none",
        pipeline="question-answering",
        architecture="QuestionAnswering",
    ),
}


def facts_of_head(head: str) -> TaskFacts | None:
    """The facts of the kinds with a head, which share what a model card says; None for a language model's."""
    return next((facts for facts in TASKS.values() if facts.head == head), None)
