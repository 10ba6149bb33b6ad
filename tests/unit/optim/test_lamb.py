"""LAMB against the paper's algorithm, NVIDIA's variant of it, and the bounds of its trust ratio."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.optim import Structure, groups
from trainer.optim.kinds.lamb import Config

SHAPES = {"table": (50, 8), "up": (31, 8), "bias": (31,), "norm": (8,), "zero": (8,)}
BETAS, EPS, DECAY = (0.9, 0.999), 1e-6, 0.01


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    sampled = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {
        name: nn.Parameter((0.02 * tensor * (name != "zero")).to(dtype))
        for name, tensor in sampled.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    """Very different sizes; the table's are 0 in some steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    scale = 10.0 ** (step % 7 - 5)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        * scale
        * (name != "table" or step % 5 > 0)
        for name, shape in SHAPES.items()
    }


def rate(step: int) -> float:
    return 1e-2 * min(1.0, step / 10)


def train(
    config: Config, parameters: dict[str, nn.Parameter], steps: range
) -> torch.optim.Optimizer:
    optimizer = config.build(parameters.items())
    for step in steps:
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient.to(parameters[name].dtype)
        groups.set_lr(optimizer, rate(step))
        optimizer.step()
    return optimizer


def expected(
    steps: int, *, scaled: set[str], bias_correction: bool = True, bound: float = float("inf")
) -> dict:
    """Algorithm 2 of arXiv 1904.00962 in fp64; `scaled` names the tensors with a trust ratio."""
    weights = {
        name: parameter.detach() for name, parameter in make_parameters(torch.float64).items()
    }
    m = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    v = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for t in range(1, steps + 1):
        for name, g in gradients(t - 1).items():
            x = weights[name]
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g * g
            corrected_m = m[name] / (1 - BETAS[0] ** t) if bias_correction else m[name]
            corrected_v = v[name] / (1 - BETAS[1] ** t) if bias_correction else v[name]
            r = corrected_m / (corrected_v.sqrt() + EPS)
            u = r + (DECAY if x.ndim > 1 else 0.0) * x
            ratio = 1.0
            if name in scaled:
                ratio = min(
                    bound, float(x.norm() / u.norm()) if x.norm() > 0 and u.norm() > 0 else 1.0
                )
            weights[name] = x - rate(t - 1) * ratio * u
    return weights


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({}, {"scaled": set(SHAPES)}),
        ({"variant": "nvidia"}, {"scaled": {"table", "up"}}),
        ({"bias_correction": False}, {"scaled": set(SHAPES), "bias_correction": False}),
        ({"max_trust_ratio": 0.05}, {"scaled": set(SHAPES), "bound": 0.05}),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_the_algorithm_of_the_paper(
    settings: dict, reference: dict, dtype: torch.dtype, tolerance: float
):
    parameters = make_parameters(dtype)
    train(Config(eps=EPS, weight_decay=DECAY, **settings), parameters, range(50))
    wanted = expected(50, **reference)
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            parameter.detach().double(), wanted[name], rtol=tolerance, atol=tolerance
        )


def test_the_settings_make_a_difference():
    settings = [{}, {"variant": "nvidia"}, {"bias_correction": False}, {"max_trust_ratio": 0.05}]
    results = []
    for each in settings:
        parameters = make_parameters()
        train(Config(**each), parameters, range(50))
        results.append(
            torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        )
    for i, result in enumerate(results):
        assert all((result - other).abs().max() > 1e-3 for other in results[:i])


def test_an_update_changes_a_matrix_by_the_learning_rate_times_its_norm():
    parameters = make_parameters()
    up = parameters["up"].detach()
    before = up.clone()
    optimizer = Config(lr=0.25, bias_correction=False).build(parameters.items())
    for name, gradient in gradients(3).items():
        parameters[name].grad = 1e3 * gradient.float()
    optimizer.step()
    assert float((up - before).norm() / before.norm()) == pytest.approx(0.25, rel=1e-5)


def test_stacked_matrices_are_updated_one_by_one():
    stacked = {"table": 2, "bias": 31}  # of 25 rows each; of single numbers
    whole = make_parameters()
    apart = {
        f"{name} {i}": nn.Parameter(block.detach().clone())
        for name in stacked
        for i, block in enumerate(whole[name].chunk(stacked[name]))
    }
    one, several = Config().build(whole.items(), Structure(stacked)), Config().build(apart.items())
    for step in range(20):
        for name, blocks in stacked.items():
            whole[name].grad = gradients(step)[name].float()
            for i, block in enumerate(whole[name].grad.chunk(blocks)):
                apart[f"{name} {i}"].grad = block
        one.step()
        several.step()
    for name, blocks in stacked.items():
        joined = torch.cat([apart[f"{name} {i}"] for i in range(blocks)])
        torch.testing.assert_close(whole[name], joined, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {"variant": "fused"},
        {"max_trust_ratio": 0},
        {"max_trust_ratio": float("nan")},
        {"betas": [0.9]},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        decode(Config, settings, "optimizer")
