"""Partitioned parameters (FSDP2, ZeRO) get the updates of whole ones from equal gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.processes import run_ranks
from trainer.checkpoint import layout
from trainer.optim import Structure, groups
from trainer.optim.kinds import adafactor, adamw, adamw_scale, lamb, muon, stable_adamw
from trainer.partition import Segment, SegmentParameter, whole_shape

STEPS = 80
LAMB = lamb.Config(lr=1e-2, max_trust_ratio=5.0)
ADAFACTOR = adafactor.Config(beta1=0.5, weight_decay=0.1, min_dim_size_to_factor=3)
ADAMW = [
    adamw.Config(),
    adamw.Config(bias_correction=False),
    adamw_scale.Config(weight_decay=0.1),
    stable_adamw.Config(weight_decay=0.1),
    muon.Config(),
]
Split: TypeAlias = tuple[int, ...]
# Flat ranges. Other splits are meshes; two dimensions are copies and shards (HSDP).
SEGMENTS: Split = ()
Case: TypeAlias = tuple[Split, Any]
Parameters: TypeAlias = dict[str, nn.Parameter]
Array: TypeAlias = np.ndarray[Any, Any]


class Model(nn.Module):
    """Odd sizes, fewer rows than processes, and a table shared by embedding and output layer."""

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


def split(shape: Split) -> Parameters:
    """This process's part of the model's parameters."""
    model = Model()
    if shape is SEGMENTS:
        return dict(segments(model))
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return dict(model.named_parameters())


def segments(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Cuts each parameter anywhere; a process's parts are contiguous in memory.

    Of four processes, the second holds nothing.
    """
    world_size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None
    numbers, wholes = np.random.default_rng(world_size), dict(model.named_parameters())
    ranges = []
    for whole in wholes.values():
        cuts = sorted(numbers.integers(0, whole.numel() + 1, min(world_size, 3) - 1).tolist())
        ends = [0, *(cuts[:1] if world_size == 4 else ()), *cuts, whole.numel()]
        ranges.append((ends[rank], ends[rank + 1]))
    parts = [
        whole.detach().flatten()[i:j] for whole, (i, j) in zip(wholes.values(), ranges, strict=True)
    ]
    memory = torch.cat(parts).split([len(part) for part in parts])
    for (name, whole), (start, _), part in zip(wholes.items(), ranges, memory, strict=True):
        yield name, SegmentParameter(part, Segment(tuple(whole.shape), start, group))


def build(config: Any, parameters: Parameters) -> torch.optim.Optimizer:
    """The optimizer, with its state."""
    optimizer: torch.optim.Optimizer = config.build(
        parameters.items(),
        Structure(
            {"qkv.weight": 3, "qkv.bias": 3}, matrices=frozenset({"qkv.weight", "dense.weight"})
        ),
    )
    groups.prime(optimizer)
    return optimizer


def train(parameters: Parameters, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Makes updates with gradients that depend only on step and name."""
    groups.set_step(optimizer, steps.start)
    for step in steps:
        groups.set_lr(optimizer, 1e-2 * min(1.0, step / 20))
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            gradient = torch.randn(whole_shape(parameter), generator=generator) * 10.0 ** (
                step % 5 - 3
            )
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            elif isinstance(parameter, SegmentParameter):
                gradient = gradient.flatten()[parameter.segment.start :][: len(parameter)].clone()
            parameter.grad = gradient
        optimizer.step()


def tensors(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, as this process holds them."""
    state = {**parameters, **groups.state_tensors(optimizer, parameters.items())}
    return {name: each.detach() for name, each in state.items()}


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor."""
    if isinstance(tensor, SegmentParameter):
        whole = torch.zeros(tensor.segment.shape)
        whole.view(-1)[tensor.segment.start :][: len(tensor)] = tensor
        dist.all_reduce(whole)
        return whole
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(parameters: Parameters, config: Any, steps: int = STEPS) -> dict[str, Array]:
    """Weights and moments after training, whole."""
    optimizer = build(config, parameters)
    train(parameters, optimizer, range(steps))
    return {name: gathered(each).numpy() for name, each in tensors(parameters, optimizer).items()}


@cache
def trained_whole(config: Any, steps: int = STEPS) -> dict[str, Array]:
    return trained(dict(Model().named_parameters()), config, steps)


def train_split(cases: list[Case]) -> list[dict[str, Array]]:
    """Trains on parameters partitioned as in each case."""
    dist.init_process_group("gloo")
    results = [trained(split(shape), config) for shape, config in cases]
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_split_parameters_are_updated_like_whole_ones(world_size: int) -> None:
    cases: list[Case] = [
        (shape, config) for shape in ((world_size,), SEGMENTS) for config in (LAMB, ADAFACTOR)
    ]
    if world_size == 2:
        cases += [(shape, config) for shape in ((2,), SEGMENTS) for config in ADAMW]
    if world_size == 4:
        cases += [((2, 2), LAMB), ((2, 2), ADAFACTOR)]
    ranks = run_ranks(world_size, train_split, cases)
    start = dict(Model().named_parameters())
    assert len(start) == 9  # the shared table counts once
    for (_, config), *results in zip(cases, *ranks, strict=True):
        whole = trained_whole(config)
        assert all(
            np.abs(whole[name] - start[name].detach().numpy()).max() > 0.01 for name in start
        )
        for result in results:
            assert list(result) == list(whole)
            for name, array in whole.items():
                np.testing.assert_allclose(result[name], array, rtol=1e-6, atol=1e-6)


def train_part(folder: Path, steps: range, shape: Split | None) -> None:
    """Resumes from the files of all ranks at steps.start, unless 0, and saves at steps.stop."""
    world_size, rank = (
        int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0))
    )
    if shape is None:
        parameters = dict(Model().named_parameters())
    else:
        dist.init_process_group("gloo")
        parameters = split(shape)
    optimizer = build(ADAFACTOR, parameters)
    state = tensors(parameters, optimizer)
    if steps.start:
        stored = layout.read_files(folder.glob(f"{steps.start}.*"))
        wanted = [piece for each in state.items() for piece in layout.local_pieces(*each)]
        layout.fill(wanted, stored.pieces)
    train(parameters, optimizer, steps)
    header, body = layout.Staging().copy(layout.pieces_to_write(state, rank, world_size)).result()
    (folder / f"{steps.stop}.{rank}").write_bytes(header + body)
    if shape is not None:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.long
def test_adafactor_resumes_at_other_world_sizes(tmp_path: Path) -> None:
    run_ranks(4, train_part, tmp_path, range(20), SEGMENTS)
    run_ranks(3, train_part, tmp_path, range(20, 40), (3,))
    run_ranks(2, train_part, tmp_path, range(40, 60), SEGMENTS)
    train_part(tmp_path, range(60, 80), None)
    moved = layout.read_files([tmp_path / "80.0"])
    whole = trained_whole(ADAFACTOR, 80)
    assert set(moved) == set(whole)
    for name, array in whole.items():
        np.testing.assert_allclose(moved[name], array, rtol=1e-6, atol=1e-6)
