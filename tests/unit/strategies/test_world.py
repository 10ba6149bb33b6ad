"""The processes of a run: what they share, and for how long."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from samestep.errors import EXIT_CRASHED, ConnectError, LaunchError
from tests.ports import free_port
from tests.processes import run_ranks
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.strategies import world as module
from trainer.strategies.kinds import fsdp
from trainer.strategies.world import PROGRESS, World

ROOT = Path(__file__).parents[3]


def test_each_attempt_begins_with_an_empty_store() -> None:
    """torchrun keeps one store over its restarts, and in it what ended the attempts before."""
    assert run_ranks(1, two_attempts) == [[False, False]]


def two_attempts() -> list[bool]:
    found = []
    for attempt in ("0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        world = World.start(20)
        assert world.store is not None
        found.append(world.store.check([PROGRESS]))
        world.tell_progress(2)
    return found


def test_who_ends_first_is_not_taken_for_dead() -> None:
    """However long the others take from the last barrier on, as on a machine that is too busy."""
    assert run_ranks(2, end_slowly) == [None, None]


def end_slowly() -> None:
    world = World.start(20)
    world.connect("gloo")
    barrier, rank = dist.barrier, world.rank
    dist.barrier = lambda: (barrier(), time.sleep(2 * rank))
    time.sleep(1)  # until they watch each other
    world.close()


def test_no_thread_is_left_in_the_store() -> None:
    """One that is inside its C++ code when the interpreter ends aborts the process."""
    assert run_ranks(2, threads_after_the_end) == [[], []]


def threads_after_the_end() -> list[str]:
    world = World.start(20)
    world.connect("gloo")
    world.close()
    return [each.name for each in threading.enumerate() if each.name == "failure-watch"]


def test_all_groups_time_out_as_the_world_does() -> None:
    """Not after the 10 or 30 minutes that torch gives a group of its own."""
    assert run_ranks(2, timeouts_of_groups) == [[45.0] * 3] * 2


def timeouts_of_groups() -> list[float]:
    world = World.start(45)
    world.connect("gloo")
    fsdp.Config(replicas=2).build(CpuAccelerator(), world, "fp32")
    world.new_group([0, 1])
    return [seconds for seconds, _ in timeouts()]


def timeouts() -> list[tuple[float, str]]:
    """The time-out and the description of each process group of this process."""
    cpu = torch.device("cpu")
    return [
        (group._get_backend(cpu).options._timeout.total_seconds(), group.group_desc)
        for group in dist.distributed_c10d._world.pg_map
    ]


def test_the_world_alone_creates_groups() -> None:
    """So that none has a time-out of torch's."""
    calls = r"\b(new_group|new_subgroups\w*|split_group|init_device_mesh|DeviceMesh)\("
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("trainer", "data_pipeline", "launch")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if re.search(rf"(?<!world\.){calls}", path.read_text(encoding="utf-8"))
    }
    assert found == {"trainer/strategies/world.py"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ErrorType.TIMEOUT,
            r"rank 0 .* has waited in a collective for training.collective_timeout",
        ),
        (ErrorType.COMM_ERROR, "a collective of rank 0 .* has failed, and no rank says why"),
    ],
)
def test_a_failed_collective_ends_a_run_whose_main_threads_hang(
    tmp_path: Path, error: ErrorType, reason: str
) -> None:
    """As back-ends report that watch their collectives themselves, but leave the process alive."""
    with pytest.raises(AssertionError, match=r"\[0, 1\] died without a word"):
        run_ranks(2, hang_in_a_collective, error.name, tmp_path / "log")
    assert re.search(reason, (tmp_path / "log").read_text())


def hang_in_a_collective(error: str, log: Path) -> None:
    logging.basicConfig(filename=log)
    module._BROKEN_SECONDS = 0.5
    world = World.start(20)
    world.connect("gloo")
    if world.rank == 0:
        failed = SimpleNamespace(get_error=lambda: ErrorType.__members__[error])
        groups = {"own": SimpleNamespace(_get_backend=lambda device: failed)}
        dist.distributed_c10d._world = SimpleNamespace(pg_map=groups.values())
        world._devices.append(torch.device("cpu"))
    time.sleep(60)


def test_ranks_that_would_train_something_else_do_not_start() -> None:
    """However many differ: each names the rank that came first."""
    found = run_ranks(3, start_with_own_seed)
    assert sorted(each is None for each in found) == [False, False, True]
    first = next(each for each in found if each)
    assert "differ (seed: " in first
    assert "7 on rank " in first
    assert f"({platform.node()})" in first
    assert "torch" not in first
    assert "weights" not in first


def start_with_own_seed() -> str | None:
    world = World.start(20)
    facts = {"torch": "2", "seed": str(7 + world.rank), "weights": None if world.rank else "a"}
    try:
        world.agree(facts)
    except LaunchError as error:
        return str(error)
    return None


def test_ranks_that_have_joined_are_not_missing_under_torchrun() -> None:
    """It counts attempts, and keys of the store have the attempt as a prefix."""
    assert run_ranks(2, missing_ranks) == ["0 of 2 ranks ()", "rank 0, which does not answer"]


def missing_ranks() -> str:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    world = World.start(20)
    assert world.store is not None
    world.store.set(f"joined/{world.rank}", "")
    world.store.wait(["joined/0", "joined/1"])
    found = module._missing_ranks()
    world.store.set(f"asked/{world.rank}", "")
    world.store.wait(["asked/0", "asked/1"])
    return found


def test_an_elastic_run_starts_again_when_its_processes_cannot_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network may fail at any moment, this one included."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        values = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            ConnectError, match="rank 1 could not connect to the other ranks"
        ) as error:
            World.start(1.0)
    assert error.value.exit_code == EXIT_CRASHED


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, r"2 of 3 ranks \(1, 2\)"), (1, "rank 0, which does not answer")]
)
def test_a_rank_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, missing: str
) -> None:
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.2)
    port = free_port()
    values = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConnectError):
        World.start(1.5)
    assert re.search(f"waiting      for {missing} at 127.0.0.1:{port}", caplog.text)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> World:
    """Rank 0, and a store in which rank 1 has published an address that nobody can reach."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, str(value))
    store = dist.HashStore()
    store.set("address/1", f"127.0.0.7 {free_port()} node-b")
    return World(0, 2, store, timedelta(seconds=20))


_UNREACHABLE = (
    r"rank 0 \(.*\) cannot reach rank 1 on node-b at 127.0.0.7:\d+ \(Connection refused\)"
)


def test_ranks_that_wait_for_impossible_connections_end_the_run(
    two_ranks: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(World, "_end", lambda _, store, reason: reasons.append(reason))
    store = two_ranks.store
    assert store is not None
    store.set("backend", "gloo")
    two_ranks._connecting.set()
    two_ranks._check_connecting(store)  # another rank may be slow
    for rank in (0, 1):
        store.set(f"ready/{rank}", "")
    store.set("backend", "nccl")
    two_ranks._check_connecting(store)  # it may connect over another network
    assert reasons == []
    assert re.search(_UNREACHABLE, caplog.text)
    monkeypatch.setenv("LOCAL_RANK", "1")
    store.set("backend", "gloo")
    two_ranks._check_connecting(store)  # another rank of this machine looks
    assert reasons == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    two_ranks._check_connecting(store)
    assert re.match(_UNREACHABLE, reasons[0])
    assert "no firewall" in reasons[0]


def test_a_back_end_that_cannot_connect_is_explained(
    two_ranks: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection refused\nframe #0")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(ConnectError, match=_UNREACHABLE):
        two_ranks.connect("gloo")
    assert two_ranks.store is not None
    with socket.create_server(("127.0.0.7", 0)) as reachable:
        two_ranks.store.set("address/1", f"127.0.0.7 {reachable.getsockname()[1]} node-b")
        with pytest.raises(ConnectError, match=r"refused\. Set GLOO_SOCKET_IFNAME \(") as error:
            two_ranks.connect("gloo")
    assert "frame" not in str(error.value)


def test_a_loopback_that_is_down_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would try for `training.collective_timeout`."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))

    def down(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", down)
    with pytest.raises(ConnectError, match=r"rank 0 .* cannot reach rank 0 at 127.0.0.1:1: timed"):
        World.start(20)


def test_a_rank_that_cannot_watch_the_others_ends_the_run(
    two_ranks: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would notice the loss of a rank."""

    def full(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(socket, "create_server", full)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as error:
        two_ranks._watch(two_ranks.store)  # type: ignore[arg-type]
    assert error.value.code == EXIT_CRASHED
    assert "cannot watch the other ranks: [Errno 24]" in caplog.text
