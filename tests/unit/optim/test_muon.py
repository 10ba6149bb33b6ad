"""Muon against `torch.optim.Muon`, and what it updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.families import albert, bart, bert, electra, t5
from trainer.optim import Structure, groups
from trainer.optim.exchange import owners
from trainer.optim.kinds.muon import Config, Muon

SHAPES = {"tall": (24, 10), "wide": (10, 24), "square": (16, 16), "vector": (7,), "table": (9, 4)}
MATRICES = frozenset({"tall", "wide", "square"})


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(
    named: dict[str, nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: int
) -> None:
    for step in range(steps):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        for optimizer in optimizers:
            groups.set_lr(optimizer, 0.02 / (step + 1))
            optimizer.step()


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_takes_the_steps_of_torch(adjust: str, nesterov: bool) -> None:
    """In bf16, torch's only format, with the same products; AdamW for the other parameters."""
    ours, theirs = parameters(), parameters()
    config = Config(
        lr=0.02,
        ns_precision="bf16",
        adjust_lr=adjust,  # type: ignore[arg-type]
        nesterov=nesterov,
        eps=1e-8,
    )
    optimizer = config.build(ours.items(), Structure(matrices=MATRICES))
    expected = [
        torch.optim.Muon(
            [theirs[name] for name in MATRICES], adjust_lr_fn=adjust, nesterov=nesterov
        ),
        torch.optim.AdamW([theirs["table"]], betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW([theirs["vector"]], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    train(ours, [optimizer], 8)
    train(theirs, expected, 8)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
def test_an_update_has_singular_values_of_about_1(shape: tuple[int, int]) -> None:
    optimizer = Config().build([("x", nn.Parameter(torch.zeros(shape)))])
    assert isinstance(optimizer, Muon)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optimizer._newton_schulz(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_fused_projection_is_several_matrices() -> None:
    """Queries, keys and values in one parameter get the updates that they would get alone."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(24, 8, generator=generator)
    fused = {"qkv": nn.Parameter(whole.clone())}
    apart = {f"{i}": nn.Parameter(part.clone()) for i, part in enumerate(whole.chunk(3))}
    one = Config().build(fused.items(), Structure({"qkv": 3}, matrices=frozenset({"qkv"})))
    three = Config().build(apart.items(), Structure(matrices=frozenset(apart)))
    for step in range(5):
        gradient = torch.randn(24, 8, generator=generator) * 10.0 ** (step - 2)
        fused["qkv"].grad = gradient
        for name, part in zip(apart, gradient.chunk(3), strict=True):
            apart[name].grad = part.clone()
        one.step()
        three.step()
    torch.testing.assert_close(fused["qkv"], torch.cat(list(apart.values())), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [bert, albert, electra, t5, bart])
def test_the_matrices_of_layers_are_orthogonalized(kind: object) -> None:
    with torch.device("meta"):
        model = kind.Config().build()  # type: ignore[attr-defined]
    matrices = Structure.of(model).matrices
    assert matrices
    assert all(model.layer_of(name) is not None for name in matrices)
    kinds = ("qkv", "query", "kv", "out", "up", "down")
    assert {name.split(".")[-2] for name in matrices} <= set(kinds)


def test_owners_have_about_the_same_cost() -> None:
    assert owners([8, 5, 4, 1], 2) == [0, 1, 1, 0]
    assert owners([3, 3, 3], 5) == [0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"adamw_lr_scale": 0.0}, "adamw_lr_scale is 0.0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Config(**wrong)  # type: ignore[arg-type]
