"""Ranks that watch each other."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from contextlib import ExitStack, closing
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
from torch.distributed import HashStore, TCPStore

from samestep.errors import ConfigError, LaunchError
from tests.ports import free_port
from tests.processes import CONTEXT, run_ranks
from trainer.strategies.neighbor import (
    CONNECTIONS,
    FEWEST_CONNECTIONS,
    INTERFACE,
    OTHER_FILES,
    Neighbor,
    allow_world,
    interface_of,
    loopback_only,
    own_address,
    unreachable,
)
from trainer.strategies.world import World


def test_the_end_of_a_rank_is_noticed_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = HashStore()
    first = Neighbor(store, 0, 3)
    assert not first.dies_within(0.01)  # it has not come yet
    second, third = Neighbor(store, 1, 3), Neighbor(store, 2, 3)
    assert not any(rank.dies_within(0.05) for rank in (first, second, third))
    third.close()
    assert second.dies_within(5)
    assert second.rank == 2
    assert not first.dies_within(0.05)
    first.close()
    second.close()


def test_the_address_for_others() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) == "localhost"
    assert own_address("127.0.1.1", 1) == "127.0.1.1"  # as a machine's own name may lead to


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the address")
def test_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is listened on is what others are told."""
    monkeypatch.setenv(INTERFACE, "lo,eth7")
    assert own_address("192.0.2.77", 1) == own_address("no such host", 1) == "127.0.0.1"
    assert own_address("localhost", 1) == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = HashStore()
    with closing(Neighbor(store, 0, 2)) as first, closing(Neighbor(store, 1, 2)) as second:
        assert first._listener.getsockname()[0] == "127.0.0.1"
        assert not first.dies_within(0.05)
        second.close()
        assert first.dies_within(5)
    monkeypatch.setenv(INTERFACE, "none7")
    with pytest.raises(ConfigError, match="is none7, which is not a network interface"):
        own_address("192.0.2.77", 1)


def test_where_to_listen() -> None:
    assert [interface_of(host) for host in ("localhost", "127.0.0.1")] == 2 * ["127.0.0.1"]
    assert interface_of("192.0.2.7") == "192.0.2.7"
    assert interface_of("node0") == interface_of("fd00::2") == ""


def test_collectives_of_a_single_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv(INTERFACE, raising=False)
    assert loopback_only("localhost") == {INTERFACE: "lo"}
    assert loopback_only("node0") == {}
    monkeypatch.setenv(INTERFACE, "eth7")
    assert loopback_only("localhost") == {}, "the user's choice"


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not Neighbor(HashStore(), 0, 1).dies_within(0.01)


def test_machines_that_cannot_be_reached_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = HashStore()
    with closing(Neighbor(store, 0, 4)), closing(Neighbor(store, 1, 4)):
        reached: set[str] = set()
        for rank in (2, 3):
            store.set(f"address/{rank}", store.get("address/1"))
        assert unreachable(store, 0, 4, reached) == ""
        assert reached == {"127.0.0.1"}
        closed = free_port()
        for rank in (2, 3):  # of one machine
            store.set(f"address/{rank}", f"127.0.0.7 {closed} node b")
        assert unreachable(store, 0, 4, reached) == (
            f"rank 2 on node b at 127.0.0.7:{closed} (Connection refused)"
        )


def test_a_machine_that_has_answered_is_not_tried_again() -> None:
    """Nobody accepts, so each try stays in the kernel's queue, which is short."""
    store = HashStore()
    with socket.create_server(("127.0.0.7", 0), backlog=1) as listening:
        store.set("address/1", f"127.0.0.7 {listening.getsockname()[1]} b")
        reached: set[str] = set()
        assert [unreachable(store, 0, 2, reached) for _ in range(8)] == [""] * 8


def test_rank_0_raises_its_limit_of_open_files_before_the_ranks_connect() -> None:
    """With the soft limit of 40 that it starts with, the store would reset the last connections."""
    parent, child = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_host_a_store, args=(child, 10), daemon=True)
    process.start()
    limit, port = parent.recv()
    assert limit == 10 * CONNECTIONS + OTHER_FILES

    with ExitStack() as connected:
        for _ in range(10 * FEWEST_CONNECTIONS):
            connected.enter_context(socket.create_connection(("127.0.0.1", port)))
        last = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        assert not last.check(["key"])
    process.kill()
    process.join()


def _host_a_store(pipe: Connection, ranks: int) -> None:
    os.environ["RES_OPTIONS"] = (
        "timeout:1 attempts:1"  # the store looks up the names of its clients
    )
    _limit(40, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert allow_world(0, ranks) == ""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send((resource.getrlimit(resource.RLIMIT_NOFILE)[0], store.port))
    signal.pause()


def test_a_store_without_enough_files_is_refused_with_the_limit() -> None:
    (found,) = run_ranks(1, _refused)
    assert "300 ranks need 1156 to 2356 open files on" in found
    assert "hosts the store of the run, and its limit is 260 (hard: 260)" in found


def _refused() -> str:
    _limit(260, 260)
    return allow_world(0, 300)


def _limit(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)


def test_gloo_with_too_few_files_for_all_ranks_is_refused() -> None:
    assert run_ranks(2, _connect_with_few_files) == [True, True]


def _connect_with_few_files() -> bool:
    world = World.start(20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (257, 257))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        world.connect("gloo")
    except LaunchError as error:
        world._stop_watching()
        # Rank 0 also hosts the store, with three connections of each rank.
        needed = 264 if world.rank == 0 else 258
        return f"2 ranks need {needed} to 270 open files" in str(error)
    return False


def test_torchrun_keeps_its_limit_so_a_low_one_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setattr(resource, "prlimit", lambda pid, kind: (1024, 4096))
    assert allow_world(0, 256) == ""
    assert not caplog.text
    assert allow_world(0, 257) == ""
    assert "runs torchrun with the run's store, and its limit is 1024 (hard: 4096)" in caplog.text
