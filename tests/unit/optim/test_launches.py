"""The number of kernels that a step of an optimizer launches, counted on a model like BERT-base."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.accelerators import kernels
from trainer.models.families import bert
from trainer.optim import Structure, groups
from trainer.optim.kinds import adamw, adamw_scale, lamb, muon, stable_adamw

FUSED = {
    "adamw": adamw.Config(),
    "adamw of BERT": adamw.Config(bias_correction=False),
    "lamb": lamb.Config(),
    "lamb of nvidia": lamb.Config(variant="nvidia", max_trust_ratio=10.0),
    "stable_adamw": stable_adamw.Config(),
    "adamw_scale": adamw_scale.Config(weight_decay=0.1),
}
"""Their kernels do not depend on the number of tensors."""


class Dispatches(TorchDispatchMode):
    """Counts operators by name; `kernels` leaves out views, allocations and profiling."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        self.all[name] += 1
        if not (func.is_view or ".empty" in name or name.startswith("profiler")):
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def build(
    config: Any, layers: int, width: int = 32
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The parameters of a BERT with gradients, and their optimizer."""
    shape: dict[str, Any] = {"width": width, "heads": 2, "ffn_width": 4 * width}
    model = bert.Config(vocab_size=100, layers=layers, max_positions=16, nsp=True, **shape).build()
    named = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)

    def values(parameter: nn.Parameter) -> Tensor:
        return 0.02 * torch.randn(parameter.shape, generator=generator)

    optimizer: torch.optim.Optimizer = config.build(named.items(), Structure.of(model))
    groups.prime(optimizer)
    for parameter in named.values():
        parameter.data = values(parameter)
        parameter.grad = values(parameter)
    groups.set_lr(optimizer, 1e-2)
    return named, optimizer


def dispatches(config: Any, layers: int) -> Dispatches:
    _, optimizer = build(config, layers)
    optimizer.step()
    with Dispatches() as counts:
        optimizer.step()
    return counts


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are computed as on GPUs: by one operation for all tensors."""
    monkeypatch.setattr(kernels, "has_fast_fp64", lambda device: True)


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("name", FUSED)
def test_kernels_do_not_grow_with_the_number_of_tensors(name: str) -> None:
    few, many = dispatches(FUSED[name], 2), dispatches(FUSED[name], 12)
    assert few.kernels == many.kernels
    assert many.kernels.total() < 50, many.kernels
    # Of 206 parameters and 254 blocks: one allocation for each, and views of fused matrices.
    assert many.all.total() < 320, many.all


@pytest.mark.usefixtures("like_a_gpu")
def test_muon_launches_its_iteration_only() -> None:
    few, many = dispatches(muon.Config(), 2), dispatches(muon.Config(), 12)
    matrices = 10 * 6  # queries, keys, values, and three others in each further layer
    grown = many.kernels - few.kernels
    # The norm, its bound, a division; three products in each of five steps.
    assert grown.total() <= matrices * (3 + 15 + 1), grown


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("name", [*FUSED, "muon"])
def test_both_ways_to_compute_norms_make_the_same_updates(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = muon.Config() if name == "muon" else FUSED[name]
    trained = []
    for fast in (True, False):
        monkeypatch.setattr(kernels, "has_fast_fp64", lambda device, fast=fast: fast)
        named, optimizer = build(config, 2)
        for _ in range(5):
            optimizer.step()
        trained.append(named)
    for parameter in trained[0]:
        one, other = (each[parameter].detach() for each in trained)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
