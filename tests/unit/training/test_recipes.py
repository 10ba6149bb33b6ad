"""Every recipe's model has what its objectives need, and nothing that they do not train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.config import load, read_tree, recipes
from trainer.inspect.plan.batch import stand_in
from trainer.training.compatibility import check_needs
from trainer.training.experiment import Experiment

EXPERIMENTS = [name for name in recipes.names() if {"model", "objective"} <= set(read_tree(name))]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_model_and_objectives_of_a_recipe(name: str) -> None:
    experiment = load(Experiment, name, ["output=unused"])
    with torch.device("meta"):
        model = experiment.build_model()
    for phase in experiment.resolved_phases():
        objective = phase.objective.build(stand_in(experiment.model.vocab_size))
        check_needs(replace(experiment, objective=phase.objective), objective, model)
        sides = objective.pack_spec(phase.sequence_length).sides
        length = phase.sequence_length if sides is None or sides.joined else max(sides.size)
        assert length <= model.max_sequence_length


def test_there_are_recipes_of_experiments() -> None:
    assert len(EXPERIMENTS) > 100
