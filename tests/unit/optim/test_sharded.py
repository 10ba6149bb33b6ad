"""Optimizers on parameters that FSDP2 has split: with identical gradients, the updates of the whole ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.processes import run_ranks
from trainer.checkpoint import layout
from trainer.optim import adafactor, adamw, adamw_scale, groups, lamb

STEPS = 200
LAMB = lamb.Config(lr=1e-2, max_trust_ratio=5.0)
ADAFACTOR = adafactor.Config(beta1=0.5, weight_decay=0.1, min_dim_size_to_factor=3)
ADAMW = [adamw.Config(), adamw.Config(bias_correction=False), adamw_scale.Config(weight_decay=0.1)]
Case: TypeAlias = tuple[tuple[int, ...], Any]
Array: TypeAlias = np.ndarray[Any, Any]


class Model(nn.Module):
    """Odd sizes, fewer rows than processes, and a table that is embedding and output layer at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, 5)
        self.types = nn.Embedding(2, 5)
        self.dense = nn.Linear(5, 7)
        self.qkv = nn.Linear(5, 9)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(5, 37)
        self.out.weight = self.tokens.weight
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def build(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with its state."""
    optimizer: torch.optim.Optimizer = config.build(model.named_parameters(), {"qkv.weight": 3, "qkv.bias": 3})
    groups.prime(optimizer)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Makes updates with gradients that depend on step and name alone."""
    groups.set_step(optimizer, steps.start)
    for step in steps:
        groups.set_lr(optimizer, 1e-2 * min(1.0, step / 20))
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments by name, as they lie in this process."""
    return dict(model.named_parameters()) | groups.state_tensors(optimizer, model.named_parameters())


def trained(model: nn.Module, config: Any, steps: int = STEPS) -> dict[str, Array]:
    """Weights and moments after training, whole."""
    optimizer = build(config, model)
    train(model, optimizer, range(steps))
    state = {name: each.detach() for name, each in tensors(model, optimizer).items()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).numpy() for name, each in state.items()}


def train_split(cases: list[Case]) -> list[dict[str, Array]]:
    """Trains on a mesh of the shape of each case; two dimensions are copies and shards (HSDP)."""
    dist.init_process_group("gloo")
    results = []
    for shape, config in cases:
        model = Model()
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        results.append(trained(model, config))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_split_parameters_are_updated_like_whole_ones(world_size: int) -> None:
    cases: list[Case] = [((world_size,), LAMB), ((world_size,), ADAFACTOR)]
    if world_size == 2:
        cases += [((2,), config) for config in ADAMW]
    if world_size == 4:
        cases += [((2, 2), LAMB), ((2, 2), ADAFACTOR)]
    ranks = run_ranks(world_size, train_split, cases)
    start = dict(Model().named_parameters())
    assert len(start) == 9  # the shared table counts once
    for (_, config), *results in zip(cases, *ranks, strict=True):
        whole = trained(Model(), config)
        assert all(np.abs(whole[name] - start[name].detach().numpy()).max() > 0.05 for name in start)
        for result in results:
            assert list(result) == list(whole)
            for name, array in whole.items():
                np.testing.assert_allclose(result[name], array, rtol=1e-6, atol=1e-6)


def train_part(folder: Path, steps: range) -> None:
    """Goes on from the files of all ranks at steps.start, if that is not 0, and leaves this rank's at steps.stop."""
    world_size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    model = Model()
    if world_size > 1:
        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = build(ADAFACTOR, model)
    state = {name: each.detach() for name, each in tensors(model, optimizer).items()}
    if steps.start:
        pieces = [piece for path in folder.glob(f"{steps.start}.*") for piece in layout.read_pieces(path)]
        layout.fill([layout.local_piece(*each) for each in state.items()], layout.group_by_name(pieces))
    train(model, optimizer, steps)
    header, body = layout.Staging().copy(layout.pieces_to_write(state, rank, world_size))
    (folder / f"{steps.stop}.{rank}").write_bytes(header + body)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def test_adafactor_goes_on_at_other_world_sizes(tmp_path: Path) -> None:
    run_ranks(4, train_part, tmp_path, range(20))
    run_ranks(3, train_part, tmp_path, range(20, 40))
    train_part(tmp_path, range(40, 60))
    moved = layout.StoredTensors(layout.group_by_name(layout.read_pieces(tmp_path / "60.0")))
    whole = trained(Model(), ADAFACTOR, 60)
    assert set(moved) == set(whole)
    for name, array in whole.items():
        np.testing.assert_allclose(moved[name], array, rtol=1e-6, atol=1e-6)
