"""Every recipe's model has what its objectives need, and nothing that they do not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from samestep.config import load, read_tree, recipes
from trainer.inspect.plan.batch import stand_in
from trainer.training.compatibility import check_lengths, check_needs
from trainer.training.experiment import Experiment

EXPERIMENTS = [name for name in recipes.names() if {"model", "objective"} <= set(read_tree(name))]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_model_and_objectives_of_a_recipe(name: str) -> None:
    experiment = load(Experiment, name, ["output=unused"])
    with torch.device("meta"):
        model = experiment.build_model()
    vocabulary, phases = stand_in(experiment.model.vocab_size), experiment.resolved_phases()
    objectives = [phase.objective.build(vocabulary) for phase in phases]
    for phase, objective in zip(phases, objectives, strict=True):
        check_needs(replace(experiment, objective=phase.objective), objective, model)
    check_lengths(experiment, objectives, model)


def test_there_are_recipes_of_experiments() -> None:
    assert len(EXPERIMENTS) > 100
