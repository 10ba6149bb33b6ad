"""Snapshots in the memory of agents: any world size reads them, and one machine may be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from samestep.errors import CheckpointError
from samestep.storage import keeper
from samestep.storage.keeper import Keeper
from samestep.storage.objects import write as write_object
from tests.processes import run_ranks
from trainer.checkpoint import Checkpointer, Config
from trainer.checkpoint.urls import Url
from trainer.training.checkpoints import Checkpoints

ELEMENTS = 10_000
SECRET = bytes(range(32))


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    with Keeper(SECRET) as first, Keeper(SECRET) as second:
        yield [first, second]


def snapshots(
    addresses: list[str], own: int = 0, rank: int = 0, world_size: int = 1
) -> Checkpointer:
    folder = Url(keeper.use(addresses, own, SECRET))
    return Checkpointer(folder, Config(every=1), rank=rank, world_size=world_size, peer_timeout=30)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"model/{name}": torch.full((ELEMENTS,), float(value)) for name in "abcd"}


def save_steps(addresses: list[str], steps: int) -> None:
    """As ranks on two machines, whose keepers these are."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    taker = snapshots(addresses, rank * 2 // size, rank, size)
    for step in range(1, steps + 1):
        taker.save(step, tensors(step), {"order": step})
    taker.wait()


def restored(taker: Checkpointer, step: int) -> float:
    found = tensors(float("nan"))
    assert taker.restore(found, step)["order"] == step
    assert all(bool((tensor == found["model/a"][0]).all()) for tensor in found.values())
    return float(found["model/a"][0])


def test_either_of_two_machines_may_be_lost(keepers: list[Keeper]) -> None:
    addresses = [each.address for each in keepers]
    run_ranks(2, save_steps, addresses, 3)
    one = 4 * 4 * ELEMENTS
    for each in keepers:
        assert 2 * one <= each.bytes < 2.1 * one, "two of three stay, whole in both keepers"
    for lost, left in ((0, 1), (1, 0)):
        if lost == 1:
            keepers[lost].close()
        taker = snapshots([addresses[left]])
        assert taker.latest() == 3
        assert restored(taker, 3) == 3


def test_a_damaged_one_is_passed_over(
    keepers: list[Keeper], caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [each.address for each in keepers]
    taker = snapshots(addresses)
    for step in (1, 2):
        taker.save(step, tensors(step), {"order": step})
    taker.wait()
    write_object(
        f"{keeper.use(addresses, 0, SECRET)}/step-00000002/rank-00000.safetensors", os.urandom(999)
    )
    again = snapshots(addresses)
    assert again.latest(least=0) == 1
    assert "skipping the checkpoint of step 2" in caplog.text
    assert restored(again, 1) == 1


def test_goes_on_from_the_newest_wherever_it_is(keepers: list[Keeper], tmp_path: Path) -> None:
    addresses = [each.address for each in keepers]

    def opened() -> Checkpointer:
        return Checkpointer(tmp_path, Config(), rank=0, world_size=1)

    def damage(step: int) -> None:
        (tmp_path / f"step-{step:08d}" / "rank-00000.safetensors").unlink()

    disk, taker = opened(), snapshots(addresses)

    def newest(
        snapshots: Checkpointer | None, durable: Checkpointer = disk
    ) -> tuple[Checkpointer, int] | None:
        found = Checkpoints(durable, snapshots).newest()
        return None if found is None else (found.source, found.opened.step)

    assert newest(None) is None
    assert newest(taker) is None
    for saver, step in ((disk, 1), (taker, 2), (disk, 2)):
        saver.save(step, tensors(step), {"order": step})
        saver.wait()
        assert (newest(snapshots(addresses)) or (None, None))[1] == step
    assert newest(taker) == (taker, 2), "memory is faster"
    disk.save(3, tensors(3), {"order": 3})
    disk.wait()
    assert newest(taker) == (disk, 3)
    damage(3)
    assert newest(taker, opened()) == (taker, 2)
    taker.discard_after(1)
    assert (newest(taker, opened()) or (None, None))[1] == 2
    damage(2)
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        newest(taker, opened())
