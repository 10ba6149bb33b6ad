"""Optimizers on parameters that FSDP2 has split: with identical gradients, the updates of the whole ones."""

from __future__ import annotations

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
from trainer.optim import adamw, groups, lamb

STEPS = 200
CONFIGS = [lamb.Config(lr=1e-2, max_trust_ratio=5.0), adamw.Config(), adamw.Config(bias_correction=False)]
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


def train(model: nn.Module, config: adamw.Config) -> dict[str, Array]:
    """Returns weights and moments, whole, after gradients that depend on step and name alone."""
    optimizer = config.build(model.named_parameters(), {"qkv.weight": 3, "qkv.bias": 3})
    groups.prime(optimizer)
    for step in range(STEPS):
        groups.set_lr(optimizer, 1e-2 * min(1.0, step / 20))
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 5 - 3)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        optimizer.step()
    tensors = dict(model.named_parameters()) | groups.state_tensors(optimizer, model.named_parameters())
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    return {name: tensor.detach().numpy() for name, tensor in whole.items()}


def train_split(cases: list[tuple[tuple[int, ...], adamw.Config]]) -> list[dict[str, Array]]:
    """Trains on a mesh of the shape of each case; two dimensions are copies and shards (HSDP)."""
    dist.init_process_group("gloo")
    results = []
    for shape, config in cases:
        model = Model()
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        results.append(train(model, config))
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_split_parameters_are_updated_like_whole_ones(world_size: int) -> None:
    cases: list[tuple[tuple[int, ...], adamw.Config]] = [((world_size,), CONFIGS[0])]
    if world_size == 2:
        cases = [((2,), config) for config in CONFIGS]
    if world_size == 4:
        cases.append(((2, 2), CONFIGS[0]))
    ranks = run_ranks(world_size, train_split, cases)
    start = dict(Model().named_parameters())
    assert len(start) == 9  # the shared table counts once
    for (_, config), *results in zip(cases, *ranks, strict=True):
        whole = train(Model(), config)
        assert all(np.abs(whole[name] - start[name].detach().numpy()).max() > 0.1 for name in start)
        for result in results:
            assert list(result) == list(whole)
            for name, array in whole.items():
                np.testing.assert_allclose(result[name], array, rtol=1e-6, atol=1e-6)
