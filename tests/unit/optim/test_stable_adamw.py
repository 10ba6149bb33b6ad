"""StableAdamW against algorithm 2 of its paper, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.optim.test_adamw_scale import gradients, make_parameters, rate
from trainer.optim import Structure, groups
from trainer.optim.kinds.stable_adamw import Config


def expected(
    steps: int, decay: float, bias_correction: bool, blocks: int = 1
) -> tuple[dict[str, Tensor], float]:
    """The weights, and the largest RMS on the way."""
    weights = {n: p.detach() for n, p in make_parameters(torch.float64).items()}
    state = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
    largest = 0.0
    for t in range(1, steps + 1):
        for name, gradient in gradients(t - 1).items():
            x, (m, v) = weights[name], state[name]
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
            c1, c2 = (1 - 0.9**t, 1 - 0.98**t) if bias_correction else (1.0, 1.0)
            parts = blocks if name == "table" else 1
            for x_, m_, v_, g_ in zip(
                *(each.chunk(parts) for each in (x, m, v, gradient)), strict=True
            ):
                rms = (g_.square() / (v_ / c2).clamp(min=1e-12)).mean().sqrt().item()
                largest = max(largest, rms)
                update = (m_ / c1) / ((v_ / c2).sqrt() + 1e-6)
                if x.ndim > 1:
                    update = update + decay * x_
                x_.sub_(update, alpha=rate(t - 1) / max(1.0, rms))
    return weights, largest


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("blocks", [1, 2])
def test_it_is_the_algorithm_of_the_paper(decay: float, bias_correction: bool, blocks: int) -> None:
    parameters = make_parameters(torch.float64)
    config = Config(lr=1.0, weight_decay=decay, bias_correction=bias_correction)
    structure = Structure({"table": blocks} if blocks > 1 else {})
    optimizer = config.build(parameters.items(), structure)
    for step in range(20):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        groups.set_lr(optimizer, rate(step))
        optimizer.step()
    weights, largest = expected(20, decay, bias_correction, blocks)
    assert largest > 2  # updates were clipped
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-10, atol=1e-12)
