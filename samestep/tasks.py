"""The kinds of fine-tuning tasks, and everything that depends on a task's kind alone.

A kind has one name, used for sources, datasets, objectives and model heads alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

TaskKind: TypeAlias = Literal[
    "classification", "regression", "multiple_choice", "tagging", "question_answering", "retrieval"
]

Layout: TypeAlias = Literal["joined", "windows", "choices", "both_orders", "separate"]
"""How the texts of a row become sequences:

joined: one sequence of all texts; if it is too long, the longest texts are truncated first.
windows: the last text, after the first if there are two; a long last text becomes several examples.
choices: a sequence for each text but the first, which precedes it; together they are one example.
both_orders: two sequences of two texts, one in either order; together they are one example.
separate: each text is a sequence, packed into one row; they do not see each other.
"""


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a kind of task.

    Attributes:
        head: of the model; regression uses a classification head with one label.
        layout: how the texts of a row become sequences.
        labeled: what has a label: the row, each token of its last text, or a span of that text.
        metrics: names of the scores that its objective supports.
        constant_answer: the answer that gives the chance level when it is given to every row: one
            label, one choice, or no answer ("none"); None where every constant answer scores 0.
        pipeline: `pipeline_tag` on the Hugging Face Hub.
        architecture: suffix of its `transformers` classes, as in BertForTokenClassification.
    """

    head: str
    layout: Layout
    labeled: Literal["row", "tokens", "span"]
    metrics: tuple[str, ...]
    constant_answer: Literal["label", "choice", "none"] | None
    pipeline: str
    architecture: str


TASKS: Mapping[TaskKind, TaskFacts] = {
    "classification": TaskFacts(
        head="classification",
        layout="joined",
        labeled="row",
        metrics=(
            *("accuracy", "f1", "macro_f1", "matthews"),
            *("group_exact_match", "group_first_right"),
        ),
        constant_answer="label",
        pipeline="text-classification",
        architecture="SequenceClassification",
    ),
    "regression": TaskFacts(
        head="classification",
        layout="joined",
        labeled="row",
        metrics=("pearson", "spearman"),
        constant_answer=None,
        pipeline="text-classification",
        architecture="SequenceClassification",
    ),
    "multiple_choice": TaskFacts(
        head="multiple_choice",
        layout="choices",
        labeled="row",
        metrics=("accuracy",),
        constant_answer="choice",
        pipeline="multiple-choice",
        architecture="MultipleChoice",
    ),
    "tagging": TaskFacts(
        head="tagging",
        layout="windows",
        labeled="tokens",
        metrics=("entity_precision", "entity_recall", "entity_f1"),
        constant_answer=None,
        pipeline="token-classification",
        architecture="TokenClassification",
    ),
    "question_answering": TaskFacts(
        head="question_answering",
        layout="windows",
        labeled="span",
        metrics=(
            *("exact_match", "f1"),
            *("has_answer_exact_match", "has_answer_f1", "no_answer_accuracy"),
            *("best_exact_match", "best_f1"),
        ),
        constant_answer="none",
        pipeline="question-answering",
        architecture="QuestionAnswering",
    ),
    "retrieval": TaskFacts(
        head="embedding",
        layout="separate",
        labeled="row",
        metrics=(),
        constant_answer=None,
        pipeline="feature-extraction",
        architecture="Model",
    ),
}


def facts_of_head(head: str) -> TaskFacts | None:
    """Returns the facts of a kind with this head; None for a language model.

    For model cards: kinds with the same head have the same `pipeline` and `architecture`.
    """
    return next((facts for facts in TASKS.values() if facts.head == head), None)
