"""AdamW with and without bias correction, its parameter groups, and its state by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.accelerators import kernels
from trainer.optim import Structure, groups
from trainer.optim.kinds import adamw_scale, lamb
from trainer.optim.kinds.adamw import Config
from trainer.optim.plain_adamw import PlainAdamW

BERT_SHAPES = {
    "embeddings.tokens.weight": (50, 8),
    "embeddings.positions.weight": (16, 8),
    "embeddings.types.weight": (2, 8),
    "embeddings.norm.weight": (8,),
    "embeddings.norm.bias": (8,),
    "layers.0.attention.qkv.weight": (24, 8),
    "layers.0.attention.qkv.bias": (24,),
    "layers.0.attention.out.weight": (8, 8),
    "layers.0.attention.out.bias": (8,),
    "layers.0.attention_norm.weight": (8,),
    "layers.0.attention_norm.bias": (8,),
    "layers.0.ffn.up.weight": (32, 8),
    "layers.0.ffn.up.bias": (32,),
    "layers.0.ffn.down.weight": (8, 32),
    "layers.0.ffn.down.bias": (8,),
    "layers.0.ffn_norm.weight": (8,),
    "layers.0.ffn_norm.bias": (8,),
    "head.dense.weight": (8, 8),
    "head.dense.bias": (8,),
    "head.norm.weight": (8,),
    "head.norm.bias": (8,),
    "head.bias": (50,),
}
DECAYING = [
    "embeddings.tokens.weight",
    "embeddings.positions.weight",
    "embeddings.types.weight",
    "layers.0.attention.qkv.weight",
    "layers.0.attention.out.weight",
    "layers.0.ffn.up.weight",
    "layers.0.ffn.down.weight",
    "head.dense.weight",
]


def make_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        for name, shape in BERT_SHAPES.items()
    }


def gradients(parameters: dict[str, nn.Parameter], steps: int) -> Iterator[dict[str, Tensor]]:
    """Gradients of very different sizes, some of them zero."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 + step)
        scale = 10.0 ** (step % 7 - 5)
        yield {
            name: (torch.randn(parameter.shape, generator=generator) * scale * (step % 11 != 0)).to(
                parameter.dtype
            )
            for name, parameter in parameters.items()
        }


def train(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    steps: int,
    lr: float = 1e-3,
) -> None:
    for step, grads in enumerate(gradients(parameters, steps)):
        for name, gradient in grads.items():
            parameters[name].grad = gradient
        groups.set_lr(optimizer, lr * min(1.0, step / 10))
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_decay_and_biases_and_norms_do_not():
    parameters = make_parameters()
    decay, no_decay = groups.parameter_groups(parameters.items(), 0.01)
    names = {id(parameter): name for name, parameter in parameters.items()}
    assert [names[id(parameter)] for parameter in decay["params"]] == DECAYING
    assert {names[id(p)] for p in no_decay["params"]} == set(BERT_SHAPES) - set(DECAYING)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.01, 0.0)


@pytest.mark.parametrize("config", [Config, lamb.Config, adamw_scale.Config])
def test_the_learning_rate_decays_from_layer_to_layer(config):
    """Heads learn at the full rate, the layers below at less and less."""
    names = [
        "embeddings.norm.bias",
        "encoder.0.ffn.up.weight",
        "encoder.2.ffn.up.bias",
        "decoder.1.ffn.up.weight",
        "layers.0.ffn.up.weight",
        "head.classifier.weight",
        "final_norm.weight",
    ]
    parameters = {
        name: nn.Parameter(torch.zeros(2, 2) if "weight" in name else torch.zeros(2))
        for name in names
    }
    above = Structure(layers_above=dict(zip(names, (4, 3, 1, 1, 1, 0, 0), strict=True)))
    optimizer = config(lr=1.0, weight_decay=0.0, layer_decay=0.5).build(parameters.items(), above)
    groups.set_lr(optimizer, 8.0)
    rates = {
        id(parameter): group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert [rates[id(parameter)] for parameter in parameters.values()] == [
        0.5,
        1.0,
        4.0,
        4.0,
        4.0,
        8.0,
        8.0,
    ]
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if config is Config:  # the others scale each tensor by its own weights besides
        moved = [parameter.flatten()[0].item() for parameter in parameters.values()]
        assert moved == pytest.approx([-0.5, -1.0, -4.0, -4.0, -4.0, -8.0, -8.0], rel=1e-4)


def test_frozen_parameters_are_in_no_group():
    parameters = make_parameters()
    for name, parameter in parameters.items():
        parameter.requires_grad_(name == "head.bias")
    assert [group["params"] for group in groups.parameter_groups(parameters.items(), 0.01)] == [
        [parameters["head.bias"]]
    ]


def bert_update(
    weights: dict[str, Tensor],
    state: dict[str, tuple[Tensor, Tensor]],
    grads: dict[str, Tensor],
    lr: float,
) -> None:
    """AdamWeightDecayOptimizer.apply_gradients of google-research/bert."""
    for name, gradient in grads.items():
        m, v = state[name]
        m.mul_(0.9).add_(0.1 * gradient)
        v.mul_(0.999).add_(0.001 * gradient**2)
        update = m / (v.sqrt() + 1e-6)
        if name in DECAYING:
            update = update + 0.01 * weights[name]
        weights[name] -= lr * update


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_without_bias_correction_it_is_the_optimizer_of_bert(dtype: torch.dtype, tolerance: float):
    parameters = {
        name: nn.Parameter(parameter.detach().to(dtype))
        for name, parameter in make_parameters().items()
    }
    optimizer = Config(bias_correction=False).build(parameters.items())
    assert optimizer.defaults["fused"]
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    weights = {name: tensor.clone() for name, tensor in start.items()}
    state = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step, grads in enumerate(gradients(parameters, 100)):
        bert_update(weights, state, grads, 1e-3 * min(1.0, step / 10))
    train(optimizer, parameters, 100)
    for name, weight in weights.items():
        torch.testing.assert_close(parameters[name].detach(), weight, rtol=0, atol=tolerance)
        assert (weight - start[name]).abs().max() > 0.01
    settings = [
        (group["lr"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert settings == [(1e-3, 1e-6, 0.01), (1e-3, 1e-6, 0.0)]


def test_bias_correction_makes_a_difference():
    results = []
    for bias_correction in (True, False):
        parameters = make_parameters()
        train(Config(bias_correction=bias_correction).build(parameters.items()), parameters, 15)
        results.append(parameters["head.bias"].detach())
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_a_step_that_fails_leaves_the_settings_as_they_were():
    parameters = make_parameters()
    optimizer = Config(bias_correction=False).build(parameters.items())

    def closure() -> float:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1e-4},
        {"lr": float("inf")},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"betas": "0.9"},
        {"eps": 0},  # 0 / 0 where a weight has had no gradient
        {"weight_decay": float("nan")},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        decode(Config, settings, "optimizer")


@pytest.mark.parametrize("bias_correction", [True, False])
def test_plain_operations_compute_what_fused_kernels_do(
    monkeypatch: pytest.MonkeyPatch, bias_correction: bool
):
    """As on devices that have no such kernels."""
    config = Config(lr=1e-2, weight_decay=0.1, bias_correction=bias_correction)
    fused, traced = make_parameters(), make_parameters()
    train(config.build(fused.items()), fused, 20)
    monkeypatch.setattr(kernels, "EAGER", ())
    optimizer = config.build(traced.items())
    assert isinstance(optimizer, PlainAdamW)
    train(optimizer, traced, 20)
    for name, weight in fused.items():
        torch.testing.assert_close(traced[name].detach(), weight.detach(), rtol=0, atol=2e-6)
    assert list(groups.state_tensors(optimizer, traced.items())) == [
        f"{key}/{name}" for name in BERT_SHAPES for key in ("exp_avg", "exp_avg_sq")
    ]
