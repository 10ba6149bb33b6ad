"""Every recipe's model has what its objectives need, and nothing that they do not train."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from samestep.config import load, read_tree, recipes
from trainer.inspect.plan.batch import stand_in
from trainer.training.compatibility import check_lengths, check_needs
from trainer.training.experiment import Experiment

FOLDERS = sorted({name.split("/")[1] for name in recipes.names()} - {"tasks", "data", "launch"})


@cache  # when a test runs: each worker collects all tests
def experiments() -> list[str]:
    names = [name for name in recipes.names() if name.split("/")[1] in FOLDERS]
    return [name for name in names if {"model", "objective"} <= set(read_tree(name))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_models_and_objectives_of_recipes(folder: str) -> None:
    for name in experiments():
        if name.split("/")[1] == folder:
            check(name)


def check(name: str) -> None:
    experiment = load(Experiment, name, ["output=unused"])
    with torch.device("meta"):
        model = experiment.build_model()
    vocabulary, phases = stand_in(experiment.model.vocab_size), experiment.resolved_phases()
    objectives = [phase.objective.build(vocabulary) for phase in phases]
    for phase, objective in zip(phases, objectives, strict=True):
        check_needs(replace(experiment, objective=phase.objective), objective, model)
    check_lengths(experiment, objectives, model)


def test_there_are_recipes_of_experiments() -> None:
    assert len(experiments()) > 100
