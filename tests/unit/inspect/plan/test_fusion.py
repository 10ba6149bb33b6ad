"""Which operators become one kernel, and what it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from samestep.config import load
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.fusion import COMPILED, EAGER, FUSED, kernels
from trainer.inspect.plan.operators import Operator, Recorder, Scope
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment

_BYTES = 32 * 16 * 4


@contextmanager
def _recorded(unit: int | None = 1) -> Iterator[Recorder]:
    recorder = Recorder()
    recorder._switch(Scope("model", unit))
    with FakeTensorMode(), recorder:
        yield recorder


def test_a_chain_is_one_kernel() -> None:
    with _recorded() as recorder:
        x, weight = torch.empty(32, 16), torch.empty(16, 16)
        (((x * 2).relu() + x).softmax(-1)) @ weight
    assert [each.launches for each in kernels(recorder.operators, EAGER)] == [1] * 5
    chain, product = kernels(recorder.operators, COMPILED)
    assert chain.operators == ("mul", "relu", "add", "_softmax")
    assert chain.nbytes == 2 * _BYTES  # x is read, and only the result is written
    assert product.nbytes == 2 * _BYTES + 16 * 16 * 4


def test_a_product_ends_a_kernel() -> None:
    with _recorded() as recorder:
        x, weight = torch.empty(32, 16), torch.empty(16, 16)
        y = x * 2
        z = y @ weight
        (y + z) @ weight
    found = kernels(recorder.operators, COMPILED)
    # The addition waits for the product, so it cannot be in the kernel of the multiplication; it
    # multiplies again instead, or reads: x and y have the same size.
    assert [each.operators for each in found] == [("mul",), ("mm",), ("add",), ("mm",)]
    assert found[2].nbytes == 3 * _BYTES


def test_only_units_are_compiled() -> None:
    with _recorded(unit=None) as recorder:
        (torch.empty(32, 16) * 2).relu()
    assert len(kernels(recorder.operators, COMPILED)) == 2
    assert len(kernels(recorder.operators, replace(COMPILED, whole=True))) <= 1


def test_masks_are_hashed_again() -> None:
    with _recorded() as recorder:
        x = torch.empty(32, 16, requires_grad=True)
        weight = torch.empty(16, 16)
        keep = (torch.arange(32 * 16, dtype=torch.int32) * 7).view(32, 16).to(torch.float32)
        ((x @ weight) * keep @ weight).sum().backward()  # type: ignore[no-untyped-call]
    (forward, backward) = (
        next(each for each in kernels(recorder.operators, COMPILED) if of(each.backward, each))
        for of in (
            lambda back, each: not back and each.operators[-1] == "mul" and each.nbytes,
            lambda back, each: back and each.operators[-1] == "mul",
        )
    )
    assert forward.nbytes == 2 * _BYTES  # the product and the result, but no mask
    assert backward.nbytes == 2 * _BYTES


@pytest.fixture(scope="module")
def operators(experiment_file: str) -> list[Operator]:
    experiment = load(Experiment, experiment_file, ["model.attention_dropout=0.1"])
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    return Step(experiment, on_cpu=False).operators(objective, columns, 4)


def test_fused_attention_keeps_scores_out_of_memory(
    operators: list[Operator], experiment_file: str
) -> None:
    model = load(Experiment, experiment_file).model
    fused = [each for each in kernels(operators, FUSED) if each.kind == "attention"]
    assert len(fused) == 2 * model.layers
    assert all(each.attends for each in fused)
    forward, backward = (
        [each for each in fused if each.backward == which] for which in (False, True)
    )
    # The scores again, and two products for each of the gradients' two: 5 for 2.
    assert backward[0].flops == 2.5 * forward[0].flops
    # Queries, keys, values and the output are 4 rows x 32 positions x width; all else is small.
    tensor = 4 * 32 * model.width * 4
    assert forward[0].nbytes == pytest.approx(4 * tensor, rel=0.35)
    assert forward[0].hashes == 4.5 * 4 * model.heads * 32 * 32
    assert backward[0].hashes == 2 * forward[0].hashes


def test_each_implementation_moves_less(operators: list[Operator]) -> None:
    moved = [
        sum(each.nbytes for each in kernels(operators, how))
        for how in (EAGER, COMPILED, FUSED, replace(FUSED, narrow=True))
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[2] < 0.5 * moved[0]
    products = [
        sum(each.flops for each in kernels(operators, how) if each.kind == "products")
        for how in (EAGER, COMPILED, FUSED)
    ]
    assert len(set(products)) == 1
