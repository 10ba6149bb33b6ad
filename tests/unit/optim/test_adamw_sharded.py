"""AdamW on parameters that FSDP2 has split over two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.optim import groups
from trainer.optim.adamw import Config


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))  # odd sizes: uneven splits
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def train(model: nn.Module, config: Config) -> dict[str, Tensor]:
    """Returns weights and optimizer state after 20 steps from a primed start, whole."""
    optimizer = config.build(model.named_parameters())
    groups.prime(optimizer)
    for step in range(20):
        groups.set_lr(optimizer, 1e-2 * min(1.0, step / 5))
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = dict(model.named_parameters()) | groups.state_tensors(optimizer, model.named_parameters())
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def run_rank(rank: int, store: str, output: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = []
    for bias_correction in (True, False):
        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        results.append(train(model, Config(bias_correction=bias_correction)))
    if rank == 0:
        torch.save(results, output)
    dist.destroy_process_group()


def test_split_parameters_are_updated_like_whole_ones(tmp_path: Path):
    arguments = [str(tmp_path / "store"), str(tmp_path / "split.pt")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), *arguments], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    for split, bias_correction in zip(torch.load(tmp_path / "split.pt"), (True, False), strict=True):
        whole = train(make_model(), Config(bias_correction=bias_correction))
        assert list(split) == list(whole)
        for name, tensor in whole.items():
            torch.testing.assert_close(split[name], tensor, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), *sys.argv[2:])
