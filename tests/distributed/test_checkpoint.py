"""Checkpoints over several real processes.

Split, replicated and both, restored however the run is split next.

Run as a script, this file is one rank of a scenario.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from samestep.errors import CheckpointError
from trainer.checkpoint import Checkpointer, Config


class Tiny(nn.Module):
    """Sizes that no world size divides, fewer rows than ranks, two dtypes and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layer = nn.Linear(5, 11, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7)
        self.score = nn.Linear(3, 1)
        self.head.weight = self.embedding.weight


def logical_tensors() -> dict[str, Tensor]:
    """What every checkpoint of these tests holds, whole."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in Tiny().named_parameters():
        for prefix in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            generator = torch.Generator().manual_seed(len(tensors))
            tensors[f"{prefix}/{name}"] = torch.randn(parameter.shape, generator=generator).to(
                parameter.dtype
            )
    return tensors | {"optimizer/step": torch.tensor(17.0)}


def split(mesh: DeviceMesh | None, fill: bool) -> dict[str, Tensor]:
    """The same tensors as FSDP2 splits them over a mesh (None: plain), holding their values or
    zeros.
    """
    tensors = {
        name: tensor if fill else torch.zeros_like(tensor)
        for name, tensor in logical_tensors().items()
    }
    if mesh is None:
        return tensors
    model = Tiny()
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        for prefix in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            key = f"{prefix}/{name}"
            tensors[key] = distribute_tensor(tensors[key], mesh, parameter.placements)
    return tensors


def meshes(world_size: int) -> dict[str, DeviceMesh | None]:
    found = {"plain": None, "fsdp": init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        found["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def checkpointer(folder: Path, **arguments: float) -> Checkpointer:
    return Checkpointer(
        folder, Config(), rank=dist.get_rank(), world_size=dist.get_world_size(), **arguments
    )


def save(folder: Path) -> None:
    for name, mesh in meshes(dist.get_world_size()).items():
        saver = checkpointer(folder / f"{name}-{dist.get_world_size()}")
        tensors = split(mesh, fill=True)
        saver.save(3, tensors, {"from": name})
        for tensor in tensors.values():
            tensor.zero_()  # training goes on at once
        saver.wait()


def restore(folder: Path) -> None:
    expected = logical_tensors()
    for saved in sorted(folder.iterdir()):
        for mesh in meshes(dist.get_world_size()).values():
            tensors = split(mesh, fill=False)
            meta = checkpointer(saved).restore(tensors)
            assert meta["from"] == saved.name.split("-")[0]
            for name, tensor in tensors.items():
                assert torch.equal(whole(tensor), expected[name]), f"{saved.name}: {name}"


def failing_disk(folder: Path) -> None:
    """Rank 1 can write no more than 64 KiB into a file, the others could; later, it can again."""
    folder /= "failing_disk"
    saver = checkpointer(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {"model/weight": distribute_tensor(torch.ones(100_000), mesh, [Shard(0)])}
    saver.save(1, tensors, {})
    saver.wait()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    started = time.monotonic()
    saver.save(2, tensors, {})
    with pytest.raises(
        CheckpointError, match=r"rank 1 cannot write .*rank-00001.safetensors: File too large"
    ):
        saver.wait()
    assert time.monotonic() - started < 100, "nobody waits for the time-out"
    assert checkpointer(folder).latest() == 1, "what was committed before stays readable"
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.save(2, tensors, {})
    saver.wait()
    assert checkpointer(folder).latest() == 2


def silent_rank(folder: Path) -> None:
    """Rank 1 never writes."""
    folder /= "silent_rank"
    saver = checkpointer(folder, peer_timeout=0.5)
    if dist.get_rank() == 1:
        saver._write = lambda *_: None  # type: ignore[method-assign]
    saver.save(1, {"model/weight": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match=r"no files from ranks \[1\]"):
        saver.wait()
    assert saver.latest() is None


def damage(folder: Path) -> None:
    """One file is damaged; the one rank that reads it makes all walk back."""
    folder /= "damage"
    saver = checkpointer(folder)
    for step in (1, 2):
        saver.save(step, {"model/weight": torch.full((64,), float(step))}, {})
    saver.wait()
    if dist.get_rank() == 0:
        largest = max((folder / "step-00000002").iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-1] ^= 1
        largest.write_bytes(content)
    dist.barrier()
    assert checkpointer(folder).latest() == 1
    with pytest.raises(CheckpointError, match="damaged"):
        checkpointer(folder).restore({"model/weight": torch.zeros(64)}, step=2)


def late_folder(folder: Path) -> None:
    """Rank 1 sees the folder of a step only some time after rank 0 has made it, as on a network
    file system.
    """
    folder /= "late_folder"
    folder.mkdir(exist_ok=True)
    mine = folder if dist.get_rank() == 0 else folder.with_name("late_alias")
    saver = checkpointer(mine)
    if dist.get_rank() == 1:
        threading.Timer(0.5, mine.symlink_to, [folder]).start()
    saver.save(1, {"model/weight": torch.ones(3)}, {})
    saver.wait()
    assert saver.latest() == 1


def late_files(folder: Path) -> None:
    """Rank 1 sees some files of a step only some time after rank 0, as on a network file system."""
    folder /= "late_files"
    saver = checkpointer(folder)
    for step in (1, 2):
        saver.save(step, {"model/weight": torch.ones(3)}, {})
    saver.wait()
    if dist.get_rank() == 1:
        files = [path for path in folder.rglob("*") if path.is_file()]
        folder = folder.with_name("late_files_alias")
        late = {"COMMITTED", "rank-00001.safetensors"}

        def show(paths: list[Path]) -> None:
            for path in paths:
                (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
                (folder / path.parent.name / path.name).symlink_to(path)

        show([path for path in files if path.name not in late])
        threading.Timer(0.5, show, [[path for path in files if path.name in late]]).start()
    assert checkpointer(folder).latest() == 2


def unshared_folder(folder: Path) -> None:
    """Each rank has a folder of its own.

    All of them hear it at once, and before there is anything to save.
    """
    folder /= "unshared_folder"
    checkpointer(folder).check_shared()
    assert list(folder.iterdir()) == [], "nothing stays behind"
    dist.barrier()  # before the other rank saves something
    saver = checkpointer(folder / str(dist.get_rank()), peer_timeout=0.5)
    saver.save(1, {"model/weight": torch.ones(3)}, {})
    for use in (saver.check_shared, saver.wait):
        with pytest.raises(
            CheckpointError, match=rf"{platform.node()} cannot see .* that all nodes share"
        ):
            use()


def run_ranks(folder: Path, *scenarios: str) -> None:
    """Runs scenarios, "name:world size", one after the other, and shows what the ranks that fail
    have to say.
    """
    script = subprocess.run(
        [sys.executable, __file__, str(folder), *scenarios],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert script.returncode == 0, script.stdout


@pytest.mark.long
def test_any_split_restores_as_any_other(tmp_path: Path) -> None:
    run_ranks(tmp_path / "saved", "save:4", "restore:3", "save:3", "restore:4")

    expected = logical_tensors()
    assert len(list((tmp_path / "saved").iterdir())) == 5
    for saved in (tmp_path / "saved").iterdir():
        _, stored = Checkpointer(saved, Config(), rank=0, world_size=1).open(
            saved / "step-00000003"
        )
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
        tensors = split(None, fill=False)
        Checkpointer(saved, Config(), rank=0, world_size=1).restore(tensors)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.mark.long
def test_one_rank_s_trouble_is_everyone_s(tmp_path: Path) -> None:
    run_ranks(
        tmp_path / "runs",
        "failing_disk:2",
        "silent_rank:2",
        "damage:2",
        "late_folder:2",
        "late_files:2",
        "unshared_folder:2",
    )


def as_rank(rank: int, world_size: int, scenario: str, folder: Path, rendezvous: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    globals()[scenario](folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    importlib.import_module(
        "torch._dynamo"
    )  # DTensor needs it: seconds to import, once rather than in every rank
    for number, (name, size) in enumerate(argument.split(":") for argument in sys.argv[2:]):
        target = Path(sys.argv[1])
        meeting_place = target.with_name(f"meet-{number}")
        fork = multiprocessing.get_context("fork")  # torch is imported once for all ranks
        ranks = [
            fork.Process(target=as_rank, args=(rank, int(size), name, target, meeting_place))
            for rank in range(int(size))
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)
