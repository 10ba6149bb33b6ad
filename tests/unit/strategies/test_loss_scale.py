"""Loss scaling: steps whose gradients overflow leave no trace, with each optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import SamestepError
from trainer.optim.kinds import adafactor, adamw, adamw_scale, lamb
from trainer.strategies.loss_scale import LossScale

OPTIMIZERS = [
    adamw.Config(),
    adamw.Config(bias_correction=False),
    adamw_scale.Config(weight_decay=0.1),
    lamb.Config(),
    lamb.Config(variant="nvidia"),
    adafactor.Config(beta1=0.9, weight_decay=0.1, min_dim_size_to_factor=3),
]


class Run:
    """Three tensors and their optimizer, with gradients that are scaled or, for comparison, not."""

    def __init__(self, config: Any, *, scaled: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(n, 3, generator=generator)) for n in (5, 1)]
        self.parameters.append(nn.Parameter(torch.ones(4)))
        self.optimizer = config.build(
            (str(i), parameter) for i, parameter in enumerate(self.parameters)
        )
        self.scale = LossScale(torch.device("cpu"))
        self.scaled = scaled

    def step(self, seed: int, poison: float | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if self.scaled:
                parameter.grad *= self.scale.factor
        if poison is not None:
            self.parameters[0].grad[2, 1] = poison  # type: ignore[index]
        if not self.scaled:
            self.optimizer.step()
        else:
            norms = torch.stack([parameter.grad.norm() for parameter in self.parameters])  # type: ignore[union-attr]
            self.scale.step(self.optimizer, norms.norm() / self.scale.factor)

    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        moments = [tensor for state in states for key, tensor in state.items() if key != "step"]
        return [tensor.detach().clone() for tensor in (*self.parameters, *moments)]


@pytest.mark.parametrize("config", OPTIMIZERS)
def test_scaling_by_a_power_of_two_changes_nothing(config: Any) -> None:
    plain, scaled = Run(config, scaled=False), Run(config)
    for step in range(4):
        plain.step(step)
        scaled.step(step)
    assert all(map(torch.equal, plain.tensors(), scaled.tensors()))


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("config", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(
    config: Any, poison: float
) -> None:
    run = Run(config)
    run.step(0)
    before = run.tensors()
    run.step(1, poison)
    assert all(map(torch.equal, run.tensors(), before))
    assert run.scale.metrics() == {"loss_scale": 2.0**15, "skipped_steps": 1}
    run.step(2)
    assert all(tensor.isfinite().all() for tensor in run.tensors())
    assert not any(map(torch.equal, run.tensors(), before))


def test_a_skipped_step_counts_in_bias_correction_as_in_a_run_that_was_resumed_there() -> None:
    run = Run(adamw.Config())
    for step, poison in enumerate([None, float("inf"), None]):
        run.step(step, poison)
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {3.0}


def test_the_scale_doubles_after_2000_good_steps_and_goes_on_from_a_checkpoint() -> None:
    run = Run(adamw.Config())
    run.step(0, float("inf"))
    for _ in range(1500):
        run.step(1)
    resumed = Run(adamw.Config())
    resumed.scale.load_state_dict(run.scale.state_dict())
    for _ in range(499):
        resumed.step(1)
    assert resumed.scale.metrics() == {"loss_scale": 2.0**15, "skipped_steps": 1}
    resumed.step(1)
    assert resumed.scale.metrics() == {"loss_scale": 2.0**16, "skipped_steps": 1}


def test_a_scale_below_one_is_the_end() -> None:
    run = Run(adamw.Config())
    for _ in range(17):
        run.step(0, float("nan"))
    with pytest.raises(SamestepError, match=r"loss scale has come down to 0\.5.*bf16"):
        run.scale.metrics()


def test_a_parameter_without_gradient_counts_no_skipped_step() -> None:
    run = Run(adamw.Config())
    run.step(0)
    frozen = run.parameters[2]
    for poison in (None, float("inf")):
        for parameter in run.parameters[:2]:
            parameter.grad = torch.ones_like(parameter) * run.scale.factor
        frozen.grad = None
        norm = torch.tensor(poison or 1.0)
        run.scale.step(run.optimizer, norm)
    assert int(run.optimizer.state[run.parameters[0]]["step"]) == 3
    assert int(run.optimizer.state[frozen]["step"]) == 1
