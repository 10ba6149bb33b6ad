"""Gradual unfreezing: a frozen parameter has no update, and begins as with a new optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import ConfigError
from trainer.optim import Structure, groups
from trainer.optim.kinds import adamw, adamw_scale, lamb, muon, stable_adamw

EVERY = 3
ABOVE = {"head.weight": 0, "head.bias": 0, "layers.1.weight": 1, "layers.0.weight": 2, "bottom": 3}
MATRICES = frozenset({"layers.1.weight", "layers.0.weight"})
OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "adamw": (adamw.Config(weight_decay=0.1), False),
    "adamw, exact": (adamw.Config(weight_decay=0.1), True),
    "adamw, uncorrected": (adamw.Config(weight_decay=0.1, bias_correction=False), False),
    "adamw_scale": (adamw_scale.Config(weight_decay=0.1), False),
    "stable_adamw": (stable_adamw.Config(weight_decay=0.1), False),
    "lamb": (lamb.Config(weight_decay=0.1), False),
    "muon": (muon.Config(weight_decay=0.1), False),
}

Parameters = dict[str, nn.Parameter]
Step = Callable[[Parameters, torch.optim.Optimizer, int], None]


def make_parameters() -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn((4,) if "bias" in name else (4, 4), generator=generator))
        for name in ABOVE
    }


def build(config: Any, parameters: Parameters, exact: bool) -> torch.optim.Optimizer:
    structure = Structure(layers_above=ABOVE, matrices=MATRICES, exact=exact)
    optimizer: torch.optim.Optimizer = config.build(parameters.items(), structure)
    groups.prime(optimizer)
    return optimizer


def step(parameters: Parameters, optimizer: torch.optim.Optimizer, number: int) -> None:
    """An update with gradients that depend on the step and the name."""
    groups.set_lr(optimizer, 0.01 * (1 + number % 4))
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(100 * number + list(ABOVE).index(name))
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    groups.freeze(optimizer, number)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_begins_as_with_an_optimizer_of_its_own(name: str) -> None:
    """Bit by bit, and until then it stays as it is."""
    config, exact = OPTIMIZERS[name]
    parameters, apart = make_parameters(), make_parameters()
    optimizer = build(replace(config, unfreeze_every=EVERY), parameters, exact)
    begun: dict[str, torch.optim.Optimizer] = {}
    for number in range(EVERY * 4 + 2):
        step(parameters, optimizer, number)
        for own, above in ABOVE.items():
            if number >= above * EVERY:
                begun.setdefault(own, build(config, {own: apart[own]}, exact))
                step({own: apart[own]}, begun[own], number)
            assert torch.equal(parameters[own], apart[own]), f"{own} after step {number}"
            changed = not torch.equal(parameters[own], make_parameters()[own])
            assert changed == (number >= above * EVERY)


@pytest.mark.parametrize("begin", [2, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_exactly(name: str, begin: int) -> None:
    """From its moments and the number of steps alone."""
    config, exact = OPTIMIZERS[name]
    config = replace(config, unfreeze_every=EVERY)
    parameters = make_parameters()
    optimizer = build(config, parameters, exact)
    for number in range(begin):
        step(parameters, optimizer, number)
    resumed = copy.deepcopy(parameters)
    restored = build(config, resumed, exact)
    saved = groups.state_tensors(optimizer, parameters.items())
    for key, tensor in groups.state_tensors(restored, resumed.items()).items():
        tensor.copy_(saved[key])
    groups.set_step(restored, begin)
    for number in range(begin, EVERY * 4 + 2):
        step(parameters, optimizer, number)
        step(resumed, restored, number)
    assert all(torch.equal(resumed[own], parameters[own]) for own in ABOVE)


def test_it_goes_with_rates_that_decay_from_layer_to_layer() -> None:
    config = adamw.Config(layer_decay=0.5, unfreeze_every=EVERY)
    found = build(config, make_parameters(), False).param_groups
    pairs = {(group["lr_scale"], group["begins"]) for group in found}
    assert pairs == {(1.0, 0), (0.5, 3), (0.25, 6), (0.125, 9)}


def test_layers_that_would_stay_frozen_are_rejected() -> None:
    optimizer = build(adamw.Config(unfreeze_every=10), make_parameters(), False)
    groups.check_begins(optimizer, 31)
    message = r"unfreeze_every is 10, so the lowest layer would begin after 30 steps, and the run"
    with pytest.raises(ConfigError, match=rf"{message} has 20. Use a smaller number, such as 6"):
        groups.check_begins(optimizer, 20)
    groups.check_begins(build(adamw.Config(), make_parameters(), False), 1)
    optimizer.param_groups = [group for group in optimizer.param_groups if group["begins"]]
    with pytest.raises(ConfigError, match="this model trains nothing there"):
        groups.check_begins(optimizer, 31)
    with pytest.raises(ConfigError, match="unfreeze_every is 0"):
        adamw.Config(unfreeze_every=0)
