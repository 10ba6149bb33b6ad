"""AdamWScale against the code of nanoT5."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.optim import Structure, groups
from trainer.optim.kinds.adamw_scale import Config

SHAPES = {"table": (50, 8), "up": (31, 8), "bias": (31,), "zero": (8,)}


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
    """Very different sizes, down to the size of eps."""
    generator = torch.Generator().manual_seed(1000 + step)
    scale = 10.0 ** (step % 7 - 7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        for name, shape in SHAPES.items()
    }


def rate(step: int) -> float:
    return 5e-3 * min(1.0, 0.5 + step / 20)


def expected(steps: int, *, decay: float, bias_correction: bool) -> dict[str, Tensor]:
    """The loop body of AdamWScale.step in nanoT5/utils/copied_utils.py, in fp64."""
    weights = {
        name: parameter.detach() for name, parameter in make_parameters(torch.float64).items()
    }
    state = {
        name: (torch.zeros_like(weight), torch.zeros_like(weight))
        for name, weight in weights.items()
    }
    for t in range(1, steps + 1):
        for name, g in gradients(t - 1).items():
            p, (m, v) = weights[name], state[name]
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            step_size = rate(t - 1)
            if bias_correction:
                step_size *= math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            step_size *= max(1e-3, float(p.norm(2) / p.numel() ** 0.5))
            p.addcdiv_(m, v.sqrt().add_(1e-6), value=-step_size)
            p.add_(p, alpha=-rate(t - 1) * (decay if p.ndim > 1 else 0.0))
    return weights


@pytest.mark.parametrize(
    "settings", [{"decay": 0.0, "bias_correction": True}, {"decay": 0.1, "bias_correction": False}]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_the_optimizer_of_nanot5(
    settings: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    parameters = make_parameters(dtype)
    config = Config(weight_decay=settings["decay"], bias_correction=settings["bias_correction"])
    optimizer = config.build(parameters.items())
    for step in range(200):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient.to(dtype)
        groups.set_lr(optimizer, rate(step))
        optimizer.step()
    for name, weight in expected(200, **settings).items():
        torch.testing.assert_close(
            parameters[name].detach().double(), weight, rtol=tolerance, atol=tolerance
        )


def test_stacked_matrices_are_updated_one_by_one() -> None:
    whole = nn.Parameter(torch.cat([torch.full((3, 4), 0.1), torch.full((3, 4), 10.0)]))
    apart = [nn.Parameter(block.detach().clone()) for block in whole.chunk(2)]
    one = Config().build([("qk", whole)], Structure({"qk": 2}))
    several = Config().build([("q", apart[0]), ("k", apart[1])])
    for step in range(20):
        whole.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        apart[0].grad, apart[1].grad = whole.grad.clone().chunk(2)
        one.step()
        several.step()
    torch.testing.assert_close(whole, torch.cat(apart), rtol=1e-6, atol=0)
