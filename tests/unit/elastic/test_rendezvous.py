"""Agents that meet: ranks, spares, those who come and those who are lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from trainer.elastic import rendezvous
from trainer.elastic.rendezvous import Group, News, Over, Rendezvous
from trainer.errors import ConfigError, LaunchError, RendezvousError

Meet = Callable[[Rendezvous, int], "Future[Group | None]"]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meet]:
    """Lets agents meet at the same time."""
    monkeypatch.setattr(rendezvous, "_LAST_CALL_SECONDS", 0.2)
    with ThreadPoolExecutor(8) as pool:
        yield lambda agent, workers: pool.submit(agent.meet, workers, lambda: False)


def agents(count: int, least: int, most: int) -> list[Rendezvous]:
    first = Rendezvous("127.0.0.1:0", least, most, "train")
    first._connect()
    return [
        first,
        *(Rendezvous(f"127.0.0.1:{first._port}", least, most, "train") for _ in range(count - 1)),
    ]


def news_of(agent: Rendezvous) -> News | None:
    deadline = time.monotonic() + 2
    while (news := agent.news()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return news


def test_a_round_from_begin_to_end(meet: Meet) -> None:
    first, second, spare = agents(3, 2, 2)
    groups = [future.result(5) for future in (meet(first, 2), meet(second, 3))]
    ranks = sorted((group.first_rank, group.world_size) for group in groups if group)
    assert ranks in ([(0, 5), (2, 5)], [(0, 5), (3, 5)])
    assert groups[0] is not None
    assert len({group.port for group in groups if group}) == 1
    TCPStore("127.0.0.1", groups[0].port, is_master=False).set("reached", "1")

    waiting = meet(spare, 1)
    assert first.news() is None  # as there is no room
    second._connection.socket.close()  # type: ignore[union-attr]
    assert news_of(first) == "lost"
    again = [meet(first, 2).result(5), waiting.result(5)]
    assert sorted(group.first_rank for group in again if group) in ([0, 1], [0, 2])

    first.close(0, "done")
    with pytest.raises(Over):
        meet(spare, 1).result(5)


def test_who_comes_is_told_of(meet: Meet) -> None:
    first, second = agents(2, 1, 4)
    alone = meet(first, 1).result(5)
    assert alone is not None
    assert (alone.first_rank, alone.world_size) == (0, 1)
    waiting = meet(second, 1)
    assert news_of(first) == "arrived"
    both = [meet(first, 1).result(5), waiting.result(5)]
    assert [group.world_size for group in both if group] == [2, 2]


@pytest.mark.parametrize("address", ["nowhere", ":1", "here:port", "here:70000"])
def test_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Rendezvous(address, 1, 1, "train")


def test_too_few(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are told of who is there, and the wait has an end."""
    monkeypatch.setattr(rendezvous, "_PATIENCE_SECONDS", 0.5)
    first, second = agents(2, 3, 3)
    with caplog.at_level("INFO"):
        waiting = [meet(first, 1), meet(second, 1)]
        for future in waiting:
            with pytest.raises(
                RendezvousError, match="2 of at least 3 machines have come within"
            ) as error:
                future.result(5)
            assert error.value.exit_code == 69
    assert "2 of at least 3 here" in caplog.text


def test_an_agent_that_does_not_end_its_workers_is_waited_for_only_so_long(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ENDING_SECONDS", 0.3)
    first, second, stopped = agents(3, 1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_LAST_CALL_SECONDS", 30.0)  # for one that is late
        for future in [meet(agent, 1) for agent in (first, second, stopped)]:
            assert future.result(20) is not None
    second._connection.socket.close()  # type: ignore[union-attr]
    assert news_of(first) == "lost"
    alone = meet(first, 1).result(5)
    assert alone is not None
    assert alone.world_size == 1
    assert news_of(stopped) == "lost"
    waiting = meet(stopped, 1)  # as it wakes up
    assert news_of(first) == "arrived"
    assert [
        group.world_size for group in (meet(first, 1).result(5), waiting.result(5)) if group
    ] == [2, 2]


def test_other_runs_have_other_meetings(meet: Meet) -> None:
    (first,) = agents(1, 1, 2)
    assert meet(first, 1).result(5) is not None
    other = Rendezvous(f"127.0.0.1:{first._port}", 1, 2, "train other.yaml")
    with pytest.raises(LaunchError, match="is the agent of another run; give each run a port"):
        meet(other, 1).result(5)
    other.close(1, "turned away")
    assert first.news() is None


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_that_is_taken(meet: Meet, monkeypatch: pytest.MonkeyPatch, greeting: bytes) -> None:
    monkeypatch.setattr(rendezvous, "_GREETING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = Rendezvous(f"127.0.0.1:{server.getsockname()[1]}", 1, 2, "train")
        refused = meet(agent, 1)
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting)
            with pytest.raises(
                LaunchError, match="is no agent of samestep; give each run a port of its own"
            ):
                refused.result(5)
