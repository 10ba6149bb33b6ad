"""Operators of tiny steps, counted by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from samestep.config import load
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.operators import Operator, Recorder, Scope
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment

_ROWS = 3


def _operators(experiment: Experiment, rows: int = _ROWS) -> list[Operator]:
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    return Step(experiment, on_cpu=True).operators(objective, columns, rows)


def test_a_product_is_counted_by_hand() -> None:
    with FakeTensorMode(), Recorder() as recorder:
        (torch.empty(4, 8).t().t() @ torch.empty(8, 16)).view(64)
    (product,) = recorder.operators  # views are no operators
    assert product.name == "mm"
    assert product.flops == 2 * 4 * 8 * 16
    assert [use.nbytes for use in product.reads] == [4 * 8 * 4, 8 * 16 * 4]
    assert [use.nbytes for use in product.writes] == [4 * 16 * 4]
    assert not product.fusible


def test_bytes_are_those_of_memory() -> None:
    with FakeTensorMode(), Recorder() as recorder:
        row = torch.ones(16)
        row.expand(8, 16) + 1
        row.mul_(2)
        row.fill_(0)
    created, added, changed, filled = recorder.operators
    assert (created.nbytes, added.nbytes) == (64, 64 + 8 * 64)  # the row is read once
    assert (changed.nbytes, filled.nbytes) == (64 + 64, 64)
    values = [each.writes[0].value for each in (created, changed, filled)]
    assert len(set(values)) == 3  # each write is a new value of the storage


def test_a_sum_of_rows_ends_a_kernel_and_a_norm_does_not() -> None:
    with FakeTensorMode(), Recorder() as recorder:
        x = torch.ones(8, 16)
        x.sum(0)
        x.sum(-1)
        x.index_add_(0, torch.ones(2, dtype=torch.long), torch.ones(2, 16))
    fusible = {(each.name, each.fusible) for each in recorder.operators}
    assert {("sum", True), ("sum", False), ("index_add_", False), ("ones", True)} == fusible


def test_classes_of_a_tiny_bert(experiment_file: str) -> None:
    experiment = load(Experiment, experiment_file, ["data.packing=padded"])
    model, length = experiment.model, experiment.resolved_phases()[0].sequence_length
    operators = _operators(experiment)
    flops: dict[tuple[str, bool], float] = defaultdict(float)
    for each in operators:
        flops[each.kind, each.backward] += each.flops
    assert {kind for kind, _ in flops} == {
        "products",
        "attention",
        "elementwise",
        "loss",
        "other",
    }
    # Two products of each score with a head's width; the last layer, too, has all of the queries.
    attention = model.layers * 2 * 2 * _ROWS * length**2 * model.width
    assert flops["attention", False] == attention
    assert flops["attention", True] == 2.5 * attention  # the scores are computed again
    # Queries, keys and values at all positions; the rest of the last layer at predicted ones only.
    predicted = experiment.objective.build(stand_in(model.vocab_size)).predictions(length)
    width, inner = model.width, model.ffn_width
    projections = 2 * width * 3 * width * length * model.layers
    rest = 2 * (width * width + 2 * width * inner)
    expected = _ROWS * (projections + rest * (length * (model.layers - 1) + predicted))
    assert flops["products", False] == pytest.approx(expected)
    assert flops["products", True] == pytest.approx(2 * expected)
    head = 2 * _ROWS * predicted * width * (width + model.vocab_size)
    assert flops["loss", False] == pytest.approx(head)
    assert flops["elementwise", False] == flops["other", False] == 0


def test_gradients_of_earlier_micro_batches_are_added_apart(experiment_file: str) -> None:
    experiment = load(Experiment, experiment_file)
    added = [each for each in _operators(experiment) if each.accumulates]
    parameters = Step(experiment, on_cpu=True).parameters.values()
    assert sum(each.nbytes for each in added) == 3 * 4 * sum(each.elements for each in parameters)
    assert {each.kind for each in added} == {"other"}


def test_recomputed_layers_run_twice(experiment_file: str) -> None:
    flops = []
    for checkpointing in ("false", "true"):
        setting = f"training.activation_checkpointing={checkpointing}"
        found = _operators(load(Experiment, experiment_file, [setting]))
        layers = [each for each in found if each.kind == "products"]
        flops.append(sum(each.flops for each in layers))
        assert all(each.scope.unit is not None for each in layers)
    assert flops[1] / flops[0] == pytest.approx(4 / 3)


def test_the_update_is_the_optimizers(experiment_file: str) -> None:
    step = Step(load(Experiment, experiment_file), on_cpu=True)
    operators = step.update_operators()
    elements = sum(each.elements for each in step.parameters.values())
    assert {(each.kind, each.scope) for each in operators} == {("optimizer", Scope("optimizer"))}
    # Weights, both moments and gradients are read, and all but the gradients are written.
    assert sum(each.nbytes for each in operators) == pytest.approx(7 * 4 * elements, rel=0.02)
