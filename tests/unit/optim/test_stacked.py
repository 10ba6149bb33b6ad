"""Every optimizer updates stacked parameters of layers as it would each of them alone."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.accelerators import kernels
from trainer.optim import Structure, groups
from trainer.optim.kinds import adafactor, adamw, adamw_scale, lamb, muon, stable_adamw
from trainer.partition import StackedParameter, squared_norms

LAYERS, STEPS = 3, 12
SHAPES = {"qkv.weight": (24, 16), "down.weight": (16, 8), "qkv.bias": (24,), "norm.weight": (16,)}
STACKED = MappingProxyType({"qkv.weight": 3, "qkv.bias": 3})
OPTIMIZERS = {
    "adamw": adamw.Config(),
    "adamw of BERT": adamw.Config(bias_correction=False),
    "lamb": lamb.Config(max_trust_ratio=2.0),
    "lamb of nvidia": lamb.Config(variant="nvidia"),
    "adamw_scale": adamw_scale.Config(weight_decay=0.1),
    "stable_adamw": stable_adamw.Config(weight_decay=0.1),
    "muon": muon.Config(),
    "adafactor": adafactor.Config(min_dim_size_to_factor=4),
    "adafactor with means": adafactor.Config(
        min_dim_size_to_factor=16, beta1=0.9, weight_decay=0.1
    ),
}


def values(step: int, size: float) -> dict[str, Tensor]:
    """Random values of all layers, of sizes that differ between the layers."""
    generator = torch.Generator().manual_seed(step)
    scales = torch.tensor([1e-3, 1.0, 30.0])
    return {
        name: torch.randn(LAYERS, *shape, generator=generator)
        * size
        * scales.view(-1, *[1] * len(shape))
        for name, shape in SHAPES.items()
    }


def train(config: Any, named: dict[str, nn.Parameter], gradients: Any) -> dict[str, Tensor]:
    optimizer = config.build(
        named.items(),
        Structure(
            {name: STACKED[kind] for name in named for kind in STACKED if name.endswith(kind)},
            matrices=frozenset(
                name for name in named if name.endswith(("qkv.weight", "down.weight"))
            ),
        ),
    )
    groups.prime(optimizer)
    for step in range(STEPS):
        groups.set_lr(optimizer, 0.01 * (step + 1))
        for name, parameter in named.items():
            parameter.grad = gradients(name, values(100 + step, 10.0 ** (step % 4 - 2)))
        optimizer.step()
    return {**named, **groups.state_tensors(optimizer, named.items())}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_layer_is_updated_as_it_would_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str, fused: bool
) -> None:
    if not fused:  # as on devices that torch has no fused kernels for
        monkeypatch.setattr(kernels, "EAGER", ())
    start = values(0, 0.1)
    apart = {
        f"{i}.{name}": nn.Parameter(start[name][i].clone())
        for i in range(LAYERS)
        for name in SHAPES
    }
    expected = train(OPTIMIZERS[kind], apart, lambda name, sampled: sampled[name[2:]][int(name[0])])
    names = {name: tuple(f"{i}.{name}" for i in range(LAYERS)) for name in SHAPES}
    stacks: dict[str, nn.Parameter] = {
        names[name][0]: StackedParameter(whole.clone(), names[name])
        for name, whole in start.items()
    }
    found = train(OPTIMIZERS[kind], stacks, lambda name, sampled: sampled[name[2:]])
    for name, stack in found.items():
        assert isinstance(stack, StackedParameter)
        kept = name.removesuffix(stack.members[0])
        for own, each in zip(stack.members, stack, strict=True):
            alone = expected[kept + own]  # each CPU sums in an order of its own
            torch.testing.assert_close(
                each, alone, rtol=0, atol=1e-6 * float(alone.abs().max()), msg=kept + own
            )
    assert {
        name.removesuffix(stack.members[0]) + own
        for name, stack in found.items()
        for own in stack.members
    } == set(expected)
    moved = [float((stacks[names[name][0]].detach() - start[name]).abs().max()) for name in SHAPES]
    assert min(moved) > 1e-4


def test_norms_of_stacks() -> None:
    # In fp64, as the norms of rows of fp32 are of that precision.
    matrices, vectors, alone = (
        torch.randn(shape, dtype=torch.float64) for shape in ((3, 8, 4), (5, 7), (6,))
    )
    expected = [each.square().sum() for each in (*matrices, *vectors, alone)]
    torch.testing.assert_close(
        squared_norms([matrices, vectors, alone], [3, 5, 1]), torch.stack(expected)
    )
