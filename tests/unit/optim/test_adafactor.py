"""Adafactor against the paper's algorithms and `transformers`, and the size of its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.optim import Structure, groups
from trainer.optim.kinds.adafactor import Config
from trainer.optim.schedules import Schedule, lr_fraction
from trainer.strategies.loss_scale import LossScale

SHAPES = {"table": (50, 8), "up": (7, 31), "small": (5, 2), "bias": (31,), "zero": (8, 9)}
STEPS = 200


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    sampled = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {
        name: nn.Parameter((0.05 * tensor * (name != "zero")).to(dtype))
        for name, tensor in sampled.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    """Very different sizes; the table's are 0 in some steps, and always in half of its rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    sampled = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    sampled["table"][25:] = 0
    sampled["table"] *= step % 5 > 0
    return {name: tensor * 10.0 ** (step % 7 - 5) for name, tensor in sampled.items()}


def rate(step: int) -> float:
    return 1e-2 * min(1.0, step / 10)


def train(
    config: Any, parameters: dict[str, nn.Parameter], steps: range, optimizer: Any = None
) -> Any:
    optimizer = optimizer or config.build(parameters.items())
    for step in steps:
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)
        groups.set_lr(optimizer, rate(step))
        optimizer.step()
    return optimizer


def expected(config: Config) -> dict[str, Tensor]:
    """Algorithms 4 and 5 of arXiv 1804.04235 in fp64, with first moments and decay as in t5x."""
    weights = {
        name: parameter.detach() for name, parameter in make_parameters(torch.float64).items()
    }
    v: dict[str, Any] = {
        name: (0.0, 0.0) if min(SHAPES[name]) >= 3 and len(SHAPES[name]) == 2 else 0.0
        for name in SHAPES
    }
    m = dict.fromkeys(SHAPES, 0.0)
    for t in range(1, STEPS + 1):
        beta2 = 1 - t**-config.decay_rate
        for name, g in gradients(t - 1).items():
            x, squares = weights[name], g**2 + 1e-30
            if isinstance(v[name], tuple):
                r = beta2 * v[name][0] + (1 - beta2) * squares.mean(1, keepdim=True)
                c = beta2 * v[name][1] + (1 - beta2) * squares.mean(0, keepdim=True)
                v[name] = (r, c)
                u = g / (r @ c / r.mean()).sqrt()
            else:
                v[name] = beta2 * v[name] + (1 - beta2) * squares
                u = g / v[name].sqrt()
            u = u / max(1.0, float(u.square().mean().sqrt()) / config.clip_threshold)
            scale = max(1e-3, float(x.square().mean().sqrt())) if config.scale_by_rms else 1.0
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * rate(t - 1) * scale * u
            decay = config.weight_decay if x.ndim > 1 else 0.0
            weights[name] = (1 - rate(t - 1) * decay) * x - m[name]
    return weights


SETTINGS = [
    {},
    {"scale_by_rms": False, "beta1": 0.9},
    {"clip_threshold": 0.5, "decay_rate": 0.5, "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_the_algorithm_of_the_paper(
    settings: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    config = decode(Config, {**settings, "min_dim_size_to_factor": 3})
    parameters = make_parameters(dtype)
    train(config, parameters, range(STEPS))
    for name, weight in expected(config).items():
        torch.testing.assert_close(
            parameters[name].detach().double(), weight, rtol=tolerance, atol=tolerance
        )


def test_the_settings_make_a_difference() -> None:
    results = []
    for settings in [
        *SETTINGS,
        {"beta1": 0.9},
        {"decay_rate": 0.5},
        {"weight_decay": 0.1},
        {"clip_threshold": 0.5},
    ]:
        parameters = make_parameters()
        train(decode(Config, {**settings, "min_dim_size_to_factor": 3}), parameters, range(50))
        results.append(
            torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        )
    for i, result in enumerate(results):
        assert all((result - other).abs().max() > 1e-5 for other in results[:i])


def test_it_is_the_adafactor_of_transformers() -> None:
    ours, theirs = make_parameters(), make_parameters()
    train(Config(min_dim_size_to_factor=0), ours, range(STEPS))
    train(
        None, theirs, range(STEPS), Adafactor(list(theirs.values()), lr=1e-2, relative_step=False)
    )
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("warm_up", [True, False])
def test_the_relative_step_of_the_paper_is_a_schedule(warm_up: bool) -> None:
    schedule = Schedule("inverse_sqrt", **{"warmup_steps" if warm_up else "decay_start": 10_000})
    for step in (1, 500, 10_000, 12_345, 500_000):
        theirs = Adafactor._get_lr(  # section 7 and the warm-up, as in `transformers`
            {"relative_step": True, "warmup_init": warm_up, "scale_parameter": False, "lr": None},
            {"step": step},
        )
        assert Config().lr * lr_fraction(schedule, step, 10**6) == pytest.approx(theirs)


def test_stacked_matrices_are_updated_one_by_one() -> None:
    stacked = {"table": 2, "bias": 31}
    config = Config(beta1=0.5, min_dim_size_to_factor=8)
    whole = make_parameters()
    apart = {
        f"{name} {i}": nn.Parameter(block.detach().clone())
        for name in stacked
        for i, block in enumerate(whole[name].chunk(stacked[name]))
    }
    one, several = config.build(whole.items(), Structure(stacked)), config.build(apart.items())
    for step in range(20):
        for name, blocks in stacked.items():
            whole[name].grad = gradients(step)[name].float()
            for i, block in enumerate(gradients(step)[name].float().chunk(blocks)):
                apart[f"{name} {i}"].grad = block
        one.step()
        several.step()
    for name, blocks in stacked.items():
        joined = torch.cat([apart[f"{name} {i}"] for i in range(blocks)])
        torch.testing.assert_close(whole[name], joined, rtol=1e-6, atol=1e-8)


def test_a_matrix_has_a_row_and_a_column_of_state() -> None:
    parameters = {
        "up": nn.Parameter(torch.ones(128, 300)),
        "qkv": nn.Parameter(torch.ones(381, 500)),
    }
    optimizer = Config().build(parameters.items(), Structure({"qkv": 3}))
    groups.prime(optimizer)
    state = groups.state_tensors(optimizer, parameters.items())
    assert {name: list(tensor.shape) for name, tensor in state.items()} == {
        "exp_avg_sq_row/up": [128],
        "exp_avg_sq_col/up": [1, 300],
        "exp_avg_sq/qkv": [
            381,
            500,
        ],  # three matrices of 127 rows, fewer than are factored by default
    }


def test_a_tensor_of_zeros_grows() -> None:
    parameters = make_parameters()
    train(Config(), parameters, range(20))
    assert parameters["zero"].square().mean().sqrt() > 1e-5


def test_gradients_that_overflow_in_the_first_step_leave_no_trace() -> None:
    parameters = make_parameters()
    optimizer = Config(beta1=0.9, weight_decay=0.1, min_dim_size_to_factor=3).build(
        parameters.items()
    )
    scale = LossScale(torch.device("cpu"))
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, math.inf)
    scale.step(optimizer, torch.tensor(math.inf))
    assert all(torch.equal(parameters[name], start) for name, start in make_parameters().items())
    for name, parameter in parameters.items():
        parameter.grad = gradients(1)[name].float() * scale.factor
    scale.step(optimizer, torch.tensor(1.0))
    assert all(parameter.isfinite().all() for parameter in parameters.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1},
        {"weight_decay": float("nan")},
        {"clip_threshold": 0},
        {"decay_rate": -0.8},
        {"beta1": 1.0},
        {"eps": 0},
        {"eps": 1e-40},  # rounds in fp32
        {"min_dim_size_to_factor": -1},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        decode(Config, settings, "optimizer")
