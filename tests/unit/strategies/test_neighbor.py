"""Ranks that watch each other."""

from __future__ import annotations

import socket
import sys
from contextlib import closing

import pytest
from torch.distributed import HashStore

from samestep.errors import ConfigError
from tests.ports import free_port
from trainer.strategies.neighbor import (
    INTERFACE,
    Neighbor,
    interface_of,
    loopback_only,
    own_address,
    unreachable,
)


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
