"""Matrix products in 8 bits, emulated on the CPU: losses, names of parameters, strategies."""

from __future__ import annotations

import builtins
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from samestep.config import load
from samestep.errors import ConfigError, MissingExtra
from tests.conformance import worker
from tests.processes import run_ranks
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.inference.evaluate import evaluate
from trainer.models import Model
from trainer.models.layers import Projection
from trainer.models.peft.kinds import lora
from trainer.strategies.world import World
from trainer.training.compose import open_strategy
from trainer.training.experiment import Experiment

TOLERANCE = 1e-3
"""Largest relative difference of a loss in 12 steps, from the loss with bf16 products."""

BF16 = ["training.precision=bf16", "optimizer.lr=3e-3"]
FP8 = [*BF16, "training.fp8=true"]


def float8() -> Any:
    """The module, if torchao is installed."""
    pytest.importorskip("torchao")
    from trainer.training.compute import float8

    return float8


def train_all(file: str, cases: list[list[str]]) -> list[list[float]]:
    """The losses of several runs in this process; 8-bit products are emulated."""
    from trainer.training.compute import float8

    float8._emulate = True
    # Traces as inductor does, and generates no code.
    CpuAccelerator.compile_options = {"backend": "aot_eager"}
    world = World.start(60)
    world.connect("gloo")
    found = [worker.losses(file, overrides, world) for overrides in cases]
    world.close()
    return found


def build(file: str, *overrides: str) -> Model:
    return load(Experiment, file, ["output=x", *overrides]).build_model()


@pytest.mark.long
def test_losses_are_near_those_of_bf16(experiment_file: str, tmp_path: Path) -> None:
    float8()
    variants = [
        BF16,
        FP8,
        [*FP8, "training.micro_batch_size=3"],
        [*FP8, "training.residual=bf16"],
        [*FP8, "training.activation_checkpointing=true"],
        [*FP8, "training.compile=true"],
        [*BF16, "model.norm=pre"],
        [*FP8, "model.norm=pre"],
    ]
    cases = [
        [f"output={tmp_path / str(number)}", "strategy=single", *settings]
        for number, settings in enumerate(variants)
    ]
    (found,) = run_ranks(1, train_all, experiment_file, cases)
    bf16, fp8, cut, narrow, recomputed, compiled_fp8, pre_bf16, pre = found
    assert fp8 != bf16
    assert recomputed == compiled_fp8 == fp8
    assert fp8[-1] < fp8[0] - 0.1
    np.testing.assert_allclose(fp8, bf16, rtol=TOLERANCE)
    np.testing.assert_allclose(cut, fp8, rtol=TOLERANCE)
    np.testing.assert_allclose(narrow, bf16, rtol=TOLERANCE)
    np.testing.assert_allclose(pre, pre_bf16, rtol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_are_near_one(experiment_file: str, tmp_path: Path, strategy: str) -> None:
    """A scale is of a whole matrix of a micro-batch, so losses depend on how rows are split."""
    float8()
    case = [f"output={tmp_path / strategy}", f"strategy={strategy}", *FP8]
    ranks = run_ranks(2, train_all, experiment_file, [case])
    alone = [f"output={tmp_path / 'one'}", "strategy=single", *FP8]
    ((one,),) = run_ranks(1, train_all, experiment_file, [alone])
    assert ranks[0] == ranks[1]
    np.testing.assert_allclose(ranks[0][0], one, rtol=TOLERANCE)


def test_parameters_and_parts_stay(experiment_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = float8()
    monkeypatch.setattr(module, "_emulate", True)
    before, after = build(experiment_file), build(experiment_file)
    module.use_float8(after)
    assert after.state_dict().keys() == before.state_dict().keys()
    assert after.stacked() == before.stacked() != {}
    for name, one in before.named_modules():
        other = after.get_submodule(name)
        assert isinstance(other, module.Float8Projection) == isinstance(one, Projection)
        assert type(other) is type(one) or isinstance(one, Projection)
        if isinstance(one, Projection):
            assert isinstance(other, Projection)
            assert (other.parts, other.into_residual) == (one.parts, one.into_residual)
    converted = {name for name, each in after.named_modules() if isinstance(each, Projection)}
    assert converted == {
        f"layers.{layer}.{name}"
        for layer in range(2)
        for name in ("attention.qkv", "attention.out", "ffn.up", "ffn.down")
    }


def test_gradients_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    module = float8()
    monkeypatch.setattr(module, "_emulate", True)
    torch.manual_seed(0)
    model = nn.Sequential(Projection(32, 48, ("up",), bias=True))
    plain = nn.Sequential(nn.Linear(32, 48))
    plain.load_state_dict(model.state_dict())
    module.use_float8(model)
    x = torch.randn(5, 7, 32)  # 35 rows: padded to 48
    for each in (model, plain):
        each(x).square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        difference = (one.grad - other.grad).norm() / other.grad.norm()
        assert 0 < difference < 0.1, name


def test_a_wrong_size_is_refused(experiment_file: str) -> None:
    module = float8()
    model = build(experiment_file, "model.ffn_width=72")
    with pytest.raises(ConfigError, match=r"layers\.0\.ffn\.up is 72 x 32, but 8-bit products"):
        module.use_float8(model)


def test_replaced_projections_are_refused(experiment_file: str) -> None:
    module = float8()
    config = cast(Any, load(Experiment, experiment_file, ["output=x"]).model)
    model = replace(config, peft=lora.Config()).build()
    with pytest.raises(ConfigError, match=r"model\.peft has replaced layers\.0\.attention\.qkv"):
        module.use_float8(model)


def test_a_model_without_projections_is_refused() -> None:
    module = float8()
    with pytest.raises(ConfigError, match="no projections"):
        module.use_float8(nn.Linear(16, 16))


def test_other_precisions_are_refused(experiment_file: str) -> None:
    with pytest.raises(ConfigError, match="fp8 is true and precision is fp32"):
        load(Experiment, experiment_file, ["output=x", "training.fp8=true"])


def test_a_device_without_such_products_is_refused(experiment_file: str, tmp_path: Path) -> None:
    experiment = load(Experiment, experiment_file, [f"output={tmp_path}", *FP8])
    with (
        pytest.raises(ConfigError, match=r"CPU, .* has no 8-bit matrix products"),
        open_strategy(experiment),
    ):
        pass


def test_runs_are_evaluated_in_bf16(finished_run: Path, tmp_path: Path) -> None:
    """Without torchao, on every device."""
    folder = shutil.copytree(finished_run, tmp_path / "run")
    overrides = [f"output={folder}", "training.precision=bf16"]
    scores = [
        evaluate(load(Experiment, str(folder / "config.yaml"), [*overrides, *more]), None)
        for more in ([], ["training.fp8=true"])
    ]
    assert scores[0] == scores[1]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainer.training.compute.float8", raising=False)
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **settings: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError(name)
        return imported(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"training\.fp8 needs the package 'torchao'"):
        imported("trainer.training.compute.float8")
