"""Checkpoints in an object store: all that holds for folders, and a server that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from samestep.errors import CheckpointError, ConfigError
from samestep.storage import objects
from tests.faulty_proxy import FaultyProxy
from tests.processes import run_ranks
from trainer.checkpoint import Checkpointer, Config, files, urls

WHOLE = torch.arange(7 * 3.0).view(7, 3)


def tensors(value: float = 0.0) -> dict[str, Tensor]:
    return {"model/weight": WHOLE + value, "optimizer/step": torch.tensor(float(value))}


def open_at(url: str, **config: Any) -> Checkpointer:
    return Checkpointer(files.location(url), Config(**config), rank=0, world_size=1)


def save(url: str, *steps: int, **config: Any) -> Checkpointer:
    checkpointer = open_at(url, **config)
    for step in steps:
        checkpointer.save(step, tensors(step), {"order": step})
    checkpointer.wait()
    return checkpointer


def check_restores(url: str, step: int) -> None:
    found = tensors(float("nan"))
    assert open_at(url).restore(found)["order"] == step
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items())


@pytest.mark.long
def test_what_is_saved_is_restored_and_old_steps_go(s3_folder: str) -> None:
    checkpointer = open_at(s3_folder)
    assert checkpointer.latest() is None
    checkpointer.check_shared()
    assert objects.names(s3_folder) == []
    assert save(s3_folder, *range(1, 5), keep_every=2).steps() == [2, 3, 4]
    assert objects.names(s3_folder) == [f"step-{step:08d}" for step in (2, 3, 4)]
    assert objects.names(f"{s3_folder}/step-00000004") == [
        "COMMITTED",
        "checksums.json",
        "meta.json",
        "rank-00000.safetensors",
    ]
    check_restores(s3_folder, 4)

    objects.write(f"{s3_folder}/step-00000007/rank-00000.json", b"{}")
    checkpointer.restore(tensors(), step=2)
    checkpointer.save(3, tensors(3), {"order": 3})
    checkpointer.wait()
    assert objects.names(s3_folder) == ["step-00000002", "step-00000003"], (
        "the abandoned step and the leftover go"
    )


def truncate(url: str) -> None:
    objects.write(url, objects.read(url)[:-1])


@pytest.mark.long
def test_damage_is_walked_back_over(s3_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    harms: list[tuple[Callable[[str], None], str]] = [
        (truncate, "rank-00000.safetensors"),
        (objects.remove, "rank-00000.safetensors"),
        (objects.remove, "COMMITTED"),
    ]
    save(s3_folder, *range(len(harms) + 1), keep_every=1)
    for step, (harm, name) in enumerate(harms, start=1):
        harm(f"{s3_folder}/step-{step:08d}/{name}")
    check_restores(s3_folder, 0)
    assert all(f"step-{step:08d}" in caplog.text for step in range(1, 4))


def test_little_more_than_what_is_wanted_is_read(
    s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of large tensors, one by one; small tensors, many at once."""
    large = torch.arange(4 * 2**18).view(2**10, 2**10)
    small = {f"model/bias{number}": torch.full((3,), float(number)) for number in range(100)}
    checkpointer = open_at(s3_folder)
    checkpointer.save(1, {"model/weight": large, **small}, {})
    checkpointer.wait()
    _, stored = checkpointer.open(files.location(f"{s3_folder}/step-00000001"))
    ranges, read_range = [], objects.read_range
    monkeypatch.setattr(
        objects,
        "read_range",
        lambda *call: (ranges.append(call[2] - call[1]), read_range(*call))[1],
    )
    assert torch.equal(
        stored.elements("model/weight", 7 * 2**10 + 5, 77 * 2**10), large[7:77].flatten()[5:]
    )
    assert ranges == [70 * 2**13 - 5 * 8]
    assert all(torch.equal(stored[name], tensor) for name, tensor in small.items())
    assert torch.equal(stored.elements("model/weight", 999, 1001), large.flatten()[999:1001])
    assert sum(ranges[1:]) <= 3 * 2**18
    ranges.clear()
    monkeypatch.setattr(urls, "_PART_BYTES", 3 * 2**20)
    assert torch.equal(stored["model/weight"], large)
    assert sorted(ranges) == [2 * 2**20, 3 * 2**20, 3 * 2**20]


@pytest.mark.long
def test_a_store_that_fails_for_a_while_does_no_harm(
    faulty_s3: FaultyProxy, s3_folder: str
) -> None:
    checkpointer = save(s3_folder, 1)
    for work in (lambda: save(s3_folder, 2), lambda: check_restores(s3_folder, 2)):
        faulty_s3.faults = [503, "drop", *[None, 503, None, "drop"] * 3]
        work()
        assert not faulty_s3.faults
    assert checkpointer.steps() == [1, 2]


@pytest.mark.long
def test_silence_is_not_taken_for_damage(
    faulty_s3: FaultyProxy, s3_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Going on from an older step would then remove the newer ones."""
    save(s3_folder, 1, 2)
    for fault, words in ((503, "check the network"), (403, "AWS_PROFILE")):
        checkpointer, caplog.handler.records[:] = open_at(s3_folder), []
        checkpointer.steps = lambda: [1, 2]
        faulty_s3.faults, faulty_s3.always = [None] * 4, fault
        with pytest.raises(CheckpointError, match=words):
            checkpointer.latest()
        assert "skipping" not in caplog.text
        faulty_s3.faults, faulty_s3.always = [], None
    check_restores(s3_folder, 2)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_save_that_is_cut_off_before_any_request_leaves_a_whole_checkpoint(
    faulty_s3: FaultyProxy, s3_folder: str
) -> None:
    """As by a process that dies: the store hears no more of it.

    The next save removes what it has left.
    """
    found: list[float] = []
    cut = True
    while cut:
        folder = f"{s3_folder}/{len(found)}"
        checkpointer = save(folder, 1, 2)
        faulty_s3.faults, faulty_s3.always = [None] * len(found), 403
        checkpointer.save(3, tensors(3), {})
        checkpointer.settle()
        cut = not faulty_s3.faults
        faulty_s3.behave()
        live = tensors(float("nan"))
        step = open_at(folder).restore(live)["step"]
        assert all(torch.equal(live[name], tensor) for name, tensor in tensors(step).items())
        found.append(step)
        save(folder, 4)
        assert objects.names(folder) == [f"step-{step:08d}", "step-00000004"]
    assert found == sorted(found)
    assert set(found) == {2, 3}
    assert len(found) > 20, "most requests were seen"


@pytest.mark.long
def test_a_bucket_that_vanishes_is_named(s3_server: str) -> None:
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="short-lived")
    checkpointer = save("s3://short-lived/run", 1)
    objects.remove_folder("s3://short-lived/run")
    s3.delete_bucket(Bucket="short-lived")
    checkpointer.save(2, tensors(), {})
    with pytest.raises(
        CheckpointError,
        match=r"step-00000002 failed: .*s3://short-lived/run.* bucket does not exist",
    ):
        checkpointer.wait()
    with pytest.raises(
        CheckpointError,
        match=r"cannot write s3://short-lived/.*bucket does not exist; check the buck",
    ):
        open_at("s3://short-lived/run").check_shared()


def test_the_folder_of_the_config_must_be_writable() -> None:
    assert Config(folder="gs://bucket/run").folder == "gs://bucket/run"
    with pytest.raises(ConfigError, match=r"folder 'https://host/run' can only be read\. Use s3"):
        Config(folder="https://host/run")


def save_on_all(url: str) -> list[str]:
    """Saves a tensor that is split over the ranks, and one that is not.

    Returns what this rank has written.
    """
    logging.disable()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    written, write = [], objects.write
    objects.write = lambda url, *parts: (
        written.append(url.rpartition("/")[2]),
        write(url, *parts),
    )[1]
    split = distribute_tensor(WHOLE + 5, init_device_mesh("cpu", (ranks,)), [Shard(0)])
    checkpointer = Checkpointer(
        files.location(url), Config(), rank=rank, world_size=ranks, peer_timeout=30
    )
    checkpointer.check_shared()
    checkpointer.save(5, {"model/weight": split, "optimizer/step": torch.tensor(5.0)}, {"order": 5})
    checkpointer.wait()
    found = distribute_tensor(torch.zeros(7, 3), split.device_mesh, [Shard(0)])
    checkpointer.restore({"model/weight": found, "optimizer/step": torch.tensor(0.0)})
    assert torch.equal(found.to_local(), split.to_local())
    return written


@pytest.mark.long
def test_two_ranks_write_what_one_reads(s3_folder: str) -> None:
    written = run_ranks(2, save_on_all, s3_folder)
    assert "rank-00001.safetensors" in written[1]
    assert "COMMITTED" in written[0]
    check_restores(s3_folder, 5)
