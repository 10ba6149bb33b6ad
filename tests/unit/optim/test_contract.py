"""What every optimizer keeps: its state by name, where it goes on, and what it leaves alone."""

from __future__ import annotations

import copy
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.optim import Structure, groups, kinds
from trainer.optim.kinds import adafactor, adamw, adamw_scale, lamb, muon, stable_adamw
from trainer.strategies.loss_scale import LossScale

CONFIGS = {
    "adamw": adamw.Config(),
    "adamw of BERT": adamw.Config(bias_correction=False),
    "lamb": lamb.Config(),
    "lamb of nvidia": lamb.Config(variant="nvidia"),
    "adamw_scale": adamw_scale.Config(weight_decay=0.1),
    "stable_adamw": stable_adamw.Config(weight_decay=0.1),
    "muon": muon.Config(),
    "adafactor": adafactor.Config(min_dim_size_to_factor=3),
    "adafactor with means": adafactor.Config(min_dim_size_to_factor=3, beta1=0.9, weight_decay=0.1),
}
SHAPES = {"table": (50, 8), "up": (31, 8), "small": (2, 2), "bias": (31,), "zero": (8,)}
STRUCTURE = Structure(matrices=frozenset({"up"}))
MOMENTS = [f"{key}/{name}" for name in SHAPES for key in ("exp_avg", "exp_avg_sq")]
FACTORED = [
    *("exp_avg_sq_row/table", "exp_avg_sq_col/table", "exp_avg_sq_row/up", "exp_avg_sq_col/up"),
    *("exp_avg_sq/small", "exp_avg_sq/bias", "exp_avg_sq/zero"),
]
STATE = {
    "muon": [key.replace("exp_avg/up", "momentum/up") for key in MOMENTS if key != "exp_avg_sq/up"],
    "adafactor": FACTORED,
}
"""Names in checkpoints; those of other optimizers are `MOMENTS`."""


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(0.02 * torch.randn(shape, generator=generator) * (name != "zero"))
        for name, shape in SHAPES.items()
    }


def build(config: Any, parameters: dict[str, nn.Parameter]) -> Any:
    return config.build(parameters.items(), STRUCTURE)


def train(optimizer: Any, parameters: dict[str, nn.Parameter], steps: range) -> None:
    """With gradients of very different sizes; the table's are 0 in some steps."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for name, parameter in parameters.items():
            size = 10.0 ** (step % 7 - 5) * (name != "table" or step % 5 > 0)
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
        groups.set_lr(optimizer, 1e-2 * min(1.0, step / 10))
        optimizer.step()


def state_of(optimizer: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return groups.state_tensors(optimizer, parameters.items())


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def test_every_kind_is_here() -> None:
    assert {config.__module__.rpartition(".")[2] for config in CONFIGS.values()} == {
        path.stem for path in files(kinds).iterdir() if path.stem[0] != "_"
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_restored_state_continues_the_run_exactly(name: str) -> None:
    whole, first = make_parameters(), make_parameters()
    train(build(CONFIGS[name], whole), whole, range(12))
    optimizer = build(CONFIGS[name], first)
    train(optimizer, first, range(7))

    resumed = copy.deepcopy(first)
    restored = build(CONFIGS[name], resumed)
    groups.prime(restored)
    saved = state_of(optimizer, first)
    for key, tensor in state_of(restored, resumed).items():
        tensor.copy_(saved[key])
    groups.set_step(restored, 7)
    train(restored, resumed, range(7, 12))
    assert_equal(resumed, whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_priming_changes_no_weight_and_no_later_step(name: str) -> None:
    plain, primed = make_parameters(), make_parameters()
    optimizers = [build(CONFIGS[name], parameters) for parameters in (plain, primed)]
    groups.prime(optimizers[1])
    assert_equal(primed, make_parameters())
    assert all(parameter.grad is None for parameter in primed.values())
    for optimizer, parameters in zip(optimizers, (plain, primed), strict=True):
        train(optimizer, parameters, range(5))
    assert_equal(primed, plain)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_names_of_its_state(name: str) -> None:
    parameters = make_parameters()
    optimizer = build(CONFIGS[name], parameters)
    with pytest.raises(AssertionError, match="prime"):
        state_of(optimizer, parameters)
    groups.prime(optimizer)
    expected = STATE.get(name, MOMENTS)
    if name == "adafactor with means":
        expected = [key for each in SHAPES for key in (*_of(each, FACTORED), f"exp_avg/{each}")]
    assert list(state_of(optimizer, parameters)) == expected


def _of(name: str, keys: list[str]) -> list[str]:
    return [key for key in keys if key.endswith(f"/{name}")]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_that_overflow_change_neither_weights_nor_state(name: str, before: int) -> None:
    parameters = make_parameters()
    optimizer = build(CONFIGS[name], parameters)
    groups.prime(optimizer)
    train(optimizer, parameters, range(before))
    weights, state = copy.deepcopy(parameters), copy.deepcopy(state_of(optimizer, parameters))
    for value in (torch.inf, torch.nan):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        LossScale(torch.device("cpu")).step(optimizer, torch.tensor(value))
    assert_equal(parameters, weights)
    assert_equal(state_of(optimizer, parameters), state)


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_alone_decay(name: str) -> None:
    """Without gradients, which some optimizers take for zeros, only decay changes a weight."""
    decays = CONFIGS[name].weight_decay > 0
    parameters = make_parameters()
    parameters["bias"].data.fill_(1.0)
    before = copy.deepcopy(parameters)
    optimizer = build(CONFIGS[name], parameters)
    groups.set_lr(optimizer, 0.1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    smaller = {each for each in SHAPES if not torch.equal(parameters[each], before[each])}
    assert smaller == ({"table", "up", "small"} if decays else set())
    assert all(parameters[each].norm() < before[each].norm() for each in smaller)
