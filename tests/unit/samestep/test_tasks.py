"""The table of task kinds agrees with the sources, objectives and heads."""

from __future__ import annotations

from importlib import import_module
from inspect import getmembers, isclass
from typing import Any, get_args

import pytest

from data_pipeline.sources import TaskSource, kinds
from samestep.config import Kinds
from samestep.examples import Vocabulary
from samestep.tasks import TASKS, TaskKind, facts_of_head
from trainer.models.config import Head

OBJECTIVES = {"retrieval": "contrastive"}  # else the kind's name
SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "special": (0, 1, 2, 3)}


@pytest.mark.parametrize("kind", [kind for kind in TASKS if kind != "retrieval"])
def test_a_kind_is_a_source_and_an_objective_and_has_a_head(kind: TaskKind) -> None:
    name = OBJECTIVES.get(kind, kind)
    schema: Any = Kinds("trainer.objectives.kinds").schema(name, "objective")
    objective = schema().build(Vocabulary(50, **SPECIAL))
    spec = objective.pack_spec(384)
    parts = spec.of_retrieval if name != kind else spec.parts
    assert (parts.kind, parts.layout) == (kind, TASKS[kind].layout)
    assert objective.predicts == TASKS[kind].head
    assert set(objective.score_names) <= set(TASKS[kind].metrics)
    Kinds(kinds.__name__).schema(kind, "source")
    module = import_module(f"{kinds.__name__}.{kind}")
    classes = [
        each for _, each in getmembers(module, isclass) if each.__module__ == module.__name__
    ]
    assert [each.kind for each in classes if issubclass(each, TaskSource)] == [kind]


def test_every_kind_and_every_head_is_in_the_table() -> None:
    assert set(TASKS) == set(get_args(TaskKind))
    assert {facts.head for facts in TASKS.values()} == set(get_args(Head)) - {"language_model"}


def test_kinds_with_the_same_head_say_the_same_of_a_model() -> None:
    for facts in TASKS.values():
        found = facts_of_head(facts.head)
        assert found is not None
        assert (found.pipeline, found.architecture) == (facts.pipeline, facts.architecture)
    assert facts_of_head("language_model") is None
