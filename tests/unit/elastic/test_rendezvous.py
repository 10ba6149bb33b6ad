"""The rendezvous of agents: ranks, spares, agents that join and agents that are lost."""

from __future__ import annotations

import platform
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from samestep.environment import open_files
from samestep.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    RendezvousError,
    UnreachableError,
)
from samestep.storage.channel import Channel
from tests.ports import free_port
from tests.waiting import until
from trainer.checkpoint import files
from trainer.elastic import host, rendezvous, rounds, secret
from trainer.elastic.host import Records, Renewal
from trainer.elastic.rendezvous import Rendezvous, RunEnded
from trainer.elastic.rounds import Event, Round

Join = Callable[[Rendezvous, int], "Future[Round | None]"]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Lets agents join at the same time."""
    monkeypatch.setattr(rounds, "_LAST_CALL_SECONDS", 0.2)
    is_over = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        yield lambda agent, workers: pool.submit(agent.join, workers, is_over.is_set)
        is_over.set()  # else those that wait in a test that has failed would wait on


@pytest.fixture(autouse=True)
def _secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(32 * "s")
    file.chmod(0o600)
    monkeypatch.setenv(secret.ENVIRONMENT, str(file))
    monkeypatch.chdir(tmp_path)  # the agents share the folder `checkpoints` there


def agent(
    port: int,
    min_agents: int,
    max_agents: int,
    run: str = "train",
    facts: dict[str, str | None] | None = None,
) -> Rendezvous:
    address = f"127.0.0.1:{port}"
    return Rendezvous(address, min_agents, max_agents, run, Path("checkpoints").absolute(), facts)


def agents(count: int, min_agents: int, max_agents: int) -> list[Rendezvous]:
    first = agent(0, min_agents, max_agents)
    first._connect()
    return [first, *(agent(first._port, min_agents, max_agents) for _ in range(count - 1))]


def event_of(agent: Rendezvous) -> Event | None:
    deadline = time.monotonic() + 2
    while (event := agent.event()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return event


def test_a_round_from_begin_to_end(join: Join) -> None:
    first, second, spare = agents(3, 2, 2)
    rounds = [future.result(5) for future in (join(first, 2), join(second, 3))]
    ranks = sorted((joined.first_rank, joined.world_size) for joined in rounds if joined)
    assert ranks in ([(0, 5), (2, 5)], [(0, 5), (3, 5)])
    assert rounds[0] is not None
    assert len({joined.port for joined in rounds if joined}) == 1
    TCPStore("127.0.0.1", rounds[0].port, is_master=False).set("reached", "1")

    waiting = join(spare, 1)
    assert first.event() is None  # as there is no room
    second._connection.socket.close()  # type: ignore[union-attr]
    assert event_of(first) == "lost"
    again = [join(first, 2).result(5), waiting.result(5)]
    assert sorted(joined.first_rank for joined in again if joined) in ([0, 1], [0, 2])

    first.close(0, "done")
    with pytest.raises(RunEnded):
        join(spare, 1).result(5)


def test_an_agent_that_joins_is_announced(join: Join) -> None:
    first, second = agents(2, 1, 4)
    alone = join(first, 1).result(5)
    assert alone is not None
    assert (alone.first_rank, alone.world_size) == (0, 1)
    waiting = join(second, 1)
    assert event_of(first) == "joined"
    both = [join(first, 1).result(5), waiting.result(5)]
    assert [joined.world_size for joined in both if joined] == [2, 2]


def test_machines_that_differ_do_not_start(join: Join) -> None:
    """Nobody knows which of them is right."""
    first = agent(0, 2, 3, facts={"seed": "1", "data": "a"})
    first._connect()
    second = agent(first._port, 2, 3, facts={"seed": "7", "data": "a", "extra": "b"})
    waiting = [join(first, 1), join(second, 1)]
    for future in waiting:
        with pytest.raises(LaunchError) as error:
            future.result(5)
        assert error.value.exit_code == 1  # a machine that differs has no reason to come again
        assert re.search(
            r"differ \((seed: 1 on .*, 7 on|seed: 7 on .*, 1 on) .*extra: ", str(error.value)
        )


def test_a_machine_that_differs_is_refused_and_the_others_go_on(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    first = agent(0, 1, 3, facts={"seed": "1", "weights": "a"})
    first._connect()
    assert join(first, 1).result(5) is not None
    wrong = agent(first._port, 1, 3, facts={"seed": "7", "weights": "a"})
    with pytest.raises(LaunchError, match="seed: 1 on"):
        join(wrong, 1).result(5)
    assert first.event() is None  # no round ends for it
    assert "refused      " in caplog.text
    right = agent(first._port, 1, 3, facts={"seed": "1", "weights": None})
    waiting = join(right, 1)
    assert event_of(first) == "joined"
    both = [join(first, 1).result(5), waiting.result(5)]
    assert [joined.world_size for joined in both if joined] == [2, 2]


def test_a_machine_of_the_run_is_right_under_a_new_host(join: Join) -> None:
    """Even if the host is a machine that has just joined and differs."""
    host = agent(0, 2, 3, facts={"seed": "7"})
    host._connect()
    wrong = join(host, 1)
    former = [agent(host._port, 2, 3, facts={"seed": "1"}) for _ in range(2)]
    for each in former:
        each._machine = replace(each._machine, has_run=True)
    rounds = [join(each, 1) for each in former]
    with pytest.raises(LaunchError, match="seed: "):
        wrong.result(5)
    assert [joined.world_size for future in rounds if (joined := future.result(5))] == [2, 2]


def test_an_agent_of_an_older_version_is_refused(join: Join) -> None:
    first = agent(0, 1, 2, facts={"samestep": "2"})
    first._connect()
    assert join(first, 1).result(5) is not None
    older = agent(first._port, 1, 2)
    send = older._send
    older._send = lambda machine=None, **rest: send(**rest)  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match=r"samestep: 2 on .*, an older version on another"):
        join(older, 1).result(5)


@pytest.mark.parametrize("address", ["nowhere", ":1", "here:port", "here:70000"])
def test_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Rendezvous(address, 1, 1, "train")


def test_too_few_agents(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They learn how many are here, and the wait has an end."""
    monkeypatch.setattr(rounds, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(rounds, "_HERE_SECONDS", 0.1)
    first, second = agents(2, 3, 3)
    with caplog.at_level("INFO"):
        waiting = [join(first, 1), join(second, 1)]
        for future in waiting:
            with pytest.raises(
                RendezvousError, match="2 of at least 3 machines have joined within"
            ) as error:
                future.result(5)
            assert error.value.exit_code == 69
    assert "2 of at least 3 here" in caplog.text


def test_an_agent_that_does_not_end_its_workers_is_waited_for_only_so_long(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_ENDING_SECONDS", 0.3)
    first, second, stopped = agents(3, 1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "_LAST_CALL_SECONDS", 30.0)  # for one that is late
        for future in [join(agent, 1) for agent in (first, second, stopped)]:
            assert future.result(20) is not None
    second._connection.socket.close()  # type: ignore[union-attr]
    assert event_of(first) == "lost"
    alone = join(first, 1).result(5)
    assert alone is not None
    assert alone.world_size == 1
    assert event_of(stopped) == "lost"
    waiting = join(stopped, 1)  # as it wakes up
    assert event_of(first) == "joined"
    both = [join(first, 1).result(5), waiting.result(5)]
    assert [joined.world_size for joined in both if joined] == [2, 2]


@pytest.mark.parametrize("count", [4, 24])
def test_each_agent_gets_a_few_messages_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """All join, one is lost, the others join again, and another one comes."""
    sent: list[dict[str, object]] = []
    send = Channel.send_json

    def recorded(channel: Channel, message: dict[str, object]) -> None:
        sent.append(message)
        send(channel, message)

    monkeypatch.setattr(Channel, "send_json", recorded)
    members = agents(count, count - 1, count)
    with ThreadPoolExecutor(count) as pool:

        def join_all() -> list[int]:
            joined = pool.map(lambda agent: agent.join(1, lambda: False), members)
            return [each.world_size for each in joined if each]

        assert join_all() == [count] * count
        lost = members.pop()
        assert lost._connection is not None
        lost._connection.socket.close()
        assert list(pool.map(event_of, members)) == ["lost"] * len(members)
        assert join_all() == [count - 1] * len(members)
        late = agent(members[0]._port, count - 1, count)
        waiting = pool.submit(late.join, 1, lambda: False)
        assert list(pool.map(event_of, members)) == ["joined"] * len(members)
        members[0].close(0, "done")
        with pytest.raises(RunEnded):
            waiting.result(5)
    assert len(sent) <= 12 * count


def test_agents_of_another_run_are_rejected(join: Join) -> None:
    (first,) = agents(1, 1, 2)
    assert join(first, 1).result(5) is not None
    other = agent(first._port, 1, 2, "train other.yaml")
    with pytest.raises(
        LaunchError, match=r"the agent of another run, .* listens at .* Give each run its own port"
    ):
        join(other, 1).result(5)
    other.close(1, "turned away")
    assert first.event() is None


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_that_is_taken(join: Join, monkeypatch: pytest.MonkeyPatch, greeting: bytes) -> None:
    monkeypatch.setattr(rendezvous, "_GREETING_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = join(agent(server.getsockname()[1], 1, 2), 1)
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting)
            with pytest.raises(
                LaunchError, match=r"another program listens at .* Give each run its own port"
            ):
                refused.result(5)


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((256, 4096), (326, 4096)), ((1024, 4096), None), ((256, -1), (326, -1)), ((-1, -1), None)],
)
def test_the_limit_on_open_files_is_raised_for_the_ranks(
    join: Join,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
) -> None:
    """Beyond it, the store resets connections without a message."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    (alone,) = agents(1, 1, 1)
    assert join(alone, 10).result(5) is not None
    assert found == ([] if raised is None else [raised])


def test_more_ranks_than_the_system_allows_files_are_refused(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 285))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    (alone,) = agents(1, 1, 1)
    match = r"10 ranks need 286 to 326 open files on .* limit is 285 \(hard: 285\)\."
    with pytest.raises(LaunchError, match=match):
        join(alone, 10).result(5)


def test_a_system_that_does_not_raise_its_limit_on_files_does_not_end_the_rendezvous(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS, which grants less than its hard limit."""

    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (290, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    (alone,) = agents(1, 1, 1)
    assert join(alone, 10).result(5) is not None
    (alone,) = agents(1, 1, 1)
    with pytest.raises(LaunchError, match="12 ranks need 292 to 340") as refused:
        join(alone, 12).result(5)
    assert "its limit is 290 (hard: inf)" in str(refused.value)


def test_a_system_without_limits_on_files(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert open_files(10) is None
    (alone,) = agents(1, 1, 1)
    assert join(alone, 10).result(5) is not None


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that is not this machine's, and where nobody answers; hosts are soon given up."""
    address, listen = "127.0.0.9", rendezvous._listen
    monkeypatch.setattr(
        rendezvous, "_listen", lambda host, port: None if host == address else listen(host, port)
    )
    monkeypatch.setattr(rendezvous, "own_address", lambda host, port: "127.0.0.1")
    for name, seconds in {"_RENEW_SECONDS": 0.1, "_SILENT_SECONDS": 1.0}.items():
        monkeypatch.setattr(host, name, seconds)
    return address


def test_when_the_host_is_lost_one_of_the_others_becomes_the_host(
    join: Join, elsewhere: str
) -> None:
    records = Records(Path("checkpoints").absolute())
    port = free_port()
    assert records.create(1, elsewhere, port) is not None
    lost = [
        Rendezvous(f"{elsewhere}:{port}", 3, 3, "train", Path("checkpoints").absolute())
        for _ in range(3)
    ]
    joined = [future.result(20) for future in [join(each, 1) for each in lost]]
    assert sorted(each.first_rank for each in joined if each) == [0, 1, 2]
    found = records.newest()
    assert found is not None
    assert (found.number, found.host) == (2, "127.0.0.1")
    assert [each.host for each in lost] == ["127.0.0.1"] * 3


def test_a_host_that_renews_its_record_is_waited_for(join: Join, elsewhere: str) -> None:
    """It cannot be reached from here, and a round of others may run there."""
    records = Records(Path("checkpoints").absolute())
    port = free_port()
    record = records.create(1, elsewhere, port)
    assert record is not None
    renewal = Renewal(records, record)
    renewal.start()
    folder = Path("checkpoints").absolute()
    waiting = join(Rendezvous(f"{elsewhere}:{port}", 1, 3, "train", folder), 1)
    with pytest.raises(TimeoutError):
        waiting.result(3)
    renewal.leave()
    assert waiting.result(20) is not None
    found = records.newest()
    assert found is not None
    assert found.number == 2


def test_a_host_without_enough_agents_does_not_keep_others_from_trying(
    elsewhere: str,
) -> None:
    alone, is_over = agent(0, 2, 3), threading.Event()
    waiting = threading.Thread(target=alone.join, args=(1, is_over.is_set), daemon=True)
    waiting.start()
    records = Records(Path("checkpoints").absolute())
    until(lambda: records.newest() is not None)
    until(lambda: records.newest() is not None and records.is_silent, 10)
    is_over.set()
    waiting.join(5)


def test_a_host_that_was_frozen_joins_the_next_one(join: Join, elsewhere: str) -> None:
    first = agent(0, 1, 1)
    assert join(first, 1).result(5) is not None
    records = Records(Path("checkpoints").absolute())
    # As another agent does while this one is frozen.
    assert records.create(2, "127.0.0.1", first._port + 1) is not None
    assert event_of(first) == "lost"
    port = free_port()
    assert records.create(3, "127.0.0.1", port) is not None
    again = join(first, 1).result(20)
    assert again is not None
    found = records.newest()
    assert found is not None
    assert (found.number, found.port) == (4, port)


def test_of_many_that_become_the_host_one_does(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda port: Records(folder).create(1, "host", port), range(8)))
    (record,) = [record for record in created if record is not None]
    assert Records(folder).newest() == record


def test_a_record_that_goes_while_it_is_read_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next host removes the record of the host before it."""
    records, read = Records(tmp_path), files.read_if_there
    assert records.create(1, "host", 1) is not None

    def replaced(path: Path) -> bytes | None:
        if path.name == ".host-00000001":
            assert Records(tmp_path).create(2, "host", 2) is not None
        return read(path)

    monkeypatch.setattr(files, "read_if_there", replaced)
    found = records.newest()
    assert found is not None
    assert (found.number, found.port) == (2, 2)

    (tmp_path / ".host-00000003").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="host-00000003 cannot be read"):
        records.newest()


def test_a_record_that_is_still_written_is_waited_for(join: Join, elsewhere: str) -> None:
    """Else two agents would be hosts: the one that writes it, and the one that looks."""
    folder = Path("checkpoints")
    folder.mkdir()
    (folder / ".host-00000004").touch()
    records = Records(folder.absolute())
    waiting = join(agent(free_port(), 1, 1), 1)
    with pytest.raises(TimeoutError):
        waiting.result(0.5)
    (found,) = folder.glob(".host-*")
    assert found.name == ".host-00000004"
    assert waiting.result(10) is not None  # as its writer was killed
    record = records.newest()
    assert record is not None
    assert record.number == 5


def test_a_pause_of_the_watcher_is_no_silence_of_the_host(tmp_path: Path, elsewhere: str) -> None:
    records = Records(tmp_path)
    record = records.create(1, "host", 1)
    assert record is not None
    assert records.newest() == record
    time.sleep(1.2)  # the watcher is frozen, and then asks before it looks again
    assert not records.is_silent
    records.write(replace(record, renewals=5))
    records.newest()
    assert not records.is_silent
    time.sleep(1.2)
    records.newest()
    assert records.is_silent


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(rounds, "SILENT_SECONDS", 1.0)


@pytest.mark.usefixtures("short_silence")
def test_an_agent_that_is_frozen_is_lost(join: Join) -> None:
    """Its kernel keeps the connection alive. When it wakes up, it joins again."""
    first, frozen = agents(2, 1, 2)
    for future in [join(each, 1) for each in (first, frozen)]:
        assert future.result(10) is not None
    began = time.monotonic()
    assert event_of(first) == "lost"
    assert time.monotonic() - began > 0.7
    assert event_of(frozen) == "lost"
    again = [join(each, 1) for each in (first, frozen)]
    assert [future.result(10) is not None for future in again] == [True, True]


@pytest.mark.usefixtures("elsewhere")
def test_a_spare_that_has_waited_for_long_survives_the_loss_of_the_host(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "PATIENCE_SECONDS", 1.5)
    monkeypatch.setattr(rounds, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(host, "_SILENT_SECONDS", 0.3)
    first, spare = agents(2, 1, 1)
    assert join(first, 1).result(5) is not None
    waiting = join(spare, 1)
    with pytest.raises(TimeoutError):
        waiting.result(1.2 * rounds.PATIENCE_SECONDS)
    # The machine of the host is lost: nobody renews its record, or listens at its address.
    lost, listen, renewal = first._port, rendezvous._listen, first._renewal
    monkeypatch.setattr(
        rendezvous, "_listen", lambda host, port: None if port == lost else listen(host, port)
    )
    assert renewal is not None
    renewal._stopped.set()
    renewal.join()
    renewal.is_over = True
    assert waiting.result(20) is not None
    assert spare._port != lost


@pytest.mark.usefixtures("short_silence")
def test_a_host_that_is_frozen_is_lost(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    _host, other = agents(2, 1, 1)
    assert join(other, 1).result(10) is not None
    began = time.monotonic()
    while time.monotonic() < began + 1.5:  # it lives, and says so
        assert other.event() is None
        time.sleep(0.05)
    monkeypatch.setattr(rounds.Host, "_tell_here", lambda _: None)
    assert event_of(other) == "lost"


def test_a_folder_that_cannot_be_read_for_a_while(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the store is down at the moment of a loss: the agent tries again."""
    alone, newest, failures = agent(0, 1, 1), Records.newest, [1, 2, 3]

    def fail_at_first(records: Records) -> host.Record | None:
        if failures:
            failures.pop()
            raise UnreachableError("the store does not answer")
        return newest(records)

    monkeypatch.setattr(Records, "newest", fail_at_first)
    assert join(alone, 1).result(10) is not None
    assert not failures


def fails_at_first(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 1) -> list[int]:
    """The host fails when it opens the store of its first rounds; returns the failures to come."""
    open_store, failures = rounds._open_store, list(range(times))

    def failing(interface: str) -> TCPStore:
        if failures:
            failures.pop()
            raise error
        return open_store(interface)

    monkeypatch.setattr(rounds, "_open_store", failing)
    return failures


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError(), KeyError()])
@pytest.mark.parametrize("count", [1, 2])
def test_a_host_that_fails_is_replaced(
    join: Join,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    count: int,
) -> None:
    """Its agents, its own included, would wait for it as long as its sockets are open."""
    failures = fails_at_first(monkeypatch, error)
    members = agents(count, count, count)
    joined = [future.result(10) for future in [join(each, 1) for each in members]]
    assert [each.world_size for each in joined if each] == [count] * count
    assert not failures
    assert (
        f"the rendezvous has failed on {platform.node()} and starts again: {error!r}" in caplog.text
    )
    found = Records(Path("checkpoints").absolute()).newest()
    assert found is not None
    assert found.number == 2


def test_an_agent_that_is_alone_replaces_its_host(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at_first(monkeypatch, OSError())
    assert join(Rendezvous("127.0.0.1:0", 1, 1, "train"), 1).result(5) is not None


def test_a_host_that_fails_again_and_again_ends_with_a_message(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at_first(monkeypatch, OSError(24, "Too many open files"), times=100)
    with pytest.raises(RendezvousError, match=r"failed 4 times .*Too many open files"):
        join(agent(0, 1, 1), 1).result(10)


def test_a_host_that_has_failed_gives_its_record_and_its_port_up(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at_first(monkeypatch, KeyError("round"))
    first = agent(0, 1, 2)
    first._connect()
    first._send(ready=1, machine={"name": "first", "facts": {}})
    records = Records(Path("checkpoints").absolute())
    until(lambda: records.newest() is not None and records.is_silent, 5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first._port), 1)


@pytest.mark.usefixtures("short_silence", "elsewhere")
def test_a_host_that_hangs_is_replaced(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel accepts connections, and another thread renews its record."""
    monkeypatch.setattr(host, "_KEEP_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "_GREETING_SECONDS", 1.0)
    hung, start = threading.Event(), rounds.Host._start_round

    def hang_at_first(each: rounds.Host) -> None:
        if each._renewal is not None and each._renewal.number == 1 and each._ready():
            hung.wait(30)
        start(each)

    monkeypatch.setattr(rounds.Host, "_start_round", hang_at_first)
    joined = [future.result(15) for future in [join(each, 1) for each in agents(2, 2, 2)]]
    assert [each.world_size for each in joined if each] == [2, 2]
    hung.set()


def test_an_agent_that_the_host_does_not_understand_is_refused(join: Join) -> None:
    """The round of the others goes on."""
    first = agent(0, 1, 2)
    first._connect()
    assert join(first, 1).result(5) is not None
    newer = agent(first._port, 1, 2)
    send = newer._send
    newer._send = lambda machine=None, **rest: send(  # type: ignore[method-assign]
        machine={**machine, "colour": "red"} if machine else None, **rest
    )
    with pytest.raises(RendezvousError, match=r"does not understand .*colour.* same version"):
        join(newer, 1).result(5)
    assert first.event() is None


@pytest.mark.parametrize(
    "message",
    [
        {"ready": "x"},
        {"ready": 10**12},
        {"ready": 1, "machine": {"name": "m", "facts": {"seed": 7}, "has_run": False}},
        {"code": [], "reason": "x"},
    ],
    ids=str,
)
def test_a_wrong_message_of_an_agent_costs_that_agent_only(
    join: Join, message: dict[str, object]
) -> None:
    first = agent(0, 1, 2)
    first._connect()
    wrong = agent(first._port, 1, 2)
    send = wrong._send
    wrong._send = lambda **_: send(**message)  # type: ignore[method-assign]
    with pytest.raises(RendezvousError, match="does not understand this agent"):
        join(wrong, 1).result(5)
    joined = join(first, 1).result(5)
    assert joined is not None
    assert joined.world_size == 1


@pytest.mark.parametrize(
    "message",
    [{"round": {"first_rank": 0}}, {"here": "x"}, {"code": None}, {"event": 1}, {"differs": []}],
    ids=str,
)
def test_a_wrong_message_of_the_host_is_an_error(
    join: Join, monkeypatch: pytest.MonkeyPatch, message: dict[str, object]
) -> None:
    def answer(host: rounds.Host, channel: Channel, _: object) -> None:
        rounds.send(channel, message)

    monkeypatch.setattr(rounds.Host, "_handle", answer)
    with pytest.raises(RendezvousError, match="does not understand the rendezvous"):
        join(agent(0, 1, 2), 1).result(5)


def test_the_thread_that_renews_the_record_survives_every_error(
    join: Join, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = agent(0, 1, 1)
    assert join(first, 1).result(5) is not None
    failures = [RuntimeError("can't start new thread"), KeyError(), OSError()]
    write = Records.write
    monkeypatch.setattr(
        Records,
        "write",
        lambda *arguments: write(*arguments) if not failures else raise_(failures.pop()),
    )
    until(lambda: not failures, 5)
    records = Records(Path("checkpoints").absolute())
    before = records.newest()
    until(lambda: records.newest() != before, 5)


def raise_(error: Exception) -> None:
    raise error
