"""Messages between holders of a secret: whole, in order, once, and from nobody else."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread

import pytest

from samestep.storage import channel
from samestep.storage.channel import Channel, Listener, WrongSecretError, connect
from tests.strangers import record

SECRET = bytes(range(32))
LIMIT = 2**20
HEADER = 8 + 32  # length and HMAC


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(socket.create_server(("127.0.0.1", 0)), SECRET, LIMIT) as created:
        yield created


def dial(listener: Listener, secret: bytes = SECRET, seconds: float = 5) -> Channel:
    return connect("127.0.0.1", listener.port, secret, LIMIT, seconds)


def ends() -> tuple[Channel, socket.socket, socket.socket, Channel]:
    """Two channels, and the two sockets of whoever sits between them."""
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            pairs.append((client, server.accept()[0]))
    (first, before), (second, behind) = pairs
    return Channel(first, b"a", b"b", LIMIT), before, behind, Channel(second, b"b", b"a", LIMIT)


def test_messages_arrive_whole_and_in_order(listener: Listener) -> None:
    contents = [b"", b"x", bytes(range(256)) * 10, b"y" * LIMIT, b"end"]
    with dial(listener) as client:
        server = listener.accept(5)
        assert server is not None
        for content in contents:
            client.send(memoryview(content))
        assert [bytes(server.receive(5) or b"") for _ in contents] == contents
        server.send_json({"a": [1]})
        assert client.receive_json(5) == {"a": [1]}
        assert client.receive(0) is None, "nothing has come"


def test_a_message_may_come_in_pieces() -> None:
    near, before, behind, far = ends()
    near.send(b"hello")
    wire = before.recv(4096)
    for byte in wire[:-1]:
        behind.sendall(bytes([byte]))
        assert far.receive(0.001) is None
    behind.sendall(wire[-1:])
    assert far.receive(5) == b"hello"


@pytest.mark.parametrize(
    "change",
    [
        lambda one, two: one[:-1] + b"!" + two,
        lambda one, two: one[:8] + bytes(32) + one[HEADER:] + two,
        lambda one, two: b"\4" + one[1:HEADER] + one[HEADER:-1] + two,
        lambda one, two: one + one,
        lambda one, two: two,
        lambda one, two: two + one,
    ],
    ids=["content", "hmac", "length", "repeated", "dropped", "swapped"],
)
def test_messages_that_were_changed_on_their_way(change: Callable[[bytes, bytes], bytes]) -> None:
    near, before, behind, far = ends()
    wires = []
    for content in (b"first", b"other"):
        near.send(content)
        wires.append(before.recv(4096))
    behind.sendall(change(*wires))
    with pytest.raises(ConnectionAbortedError, match="changed or repeated"):
        [far.receive(5) for _ in wires]


def test_a_message_does_not_come_back_to_its_sender() -> None:
    near, before, _, _ = ends()
    near.send(b"mine")
    before.sendall(before.recv(4096))
    with pytest.raises(ConnectionAbortedError, match="changed or repeated"):
        near.receive(5)


def test_a_size_is_checked_before_anything_is_allocated() -> None:
    _, _, behind, far = ends()
    behind.sendall((2**62).to_bytes(8, "little") + bytes(32))
    with pytest.raises(ConnectionAbortedError, match=f"a message of {2**62} bytes is too large"):
        far.receive(5)


@pytest.mark.parametrize("content", [b"[" * 50_000, b"[1]", b"\xff", b"1"])
def test_only_objects_are_messages(content: bytes) -> None:
    near, before, behind, far = ends()
    near.send(content)
    received = b""
    while len(received) < HEADER + len(content):
        received += before.recv(LIMIT)
    behind.sendall(received)
    with pytest.raises(ConnectionAbortedError, match="no JSON object"):
        far.receive_json(5)


def test_both_sides_need_the_secret(listener: Listener) -> None:
    with pytest.raises(WrongSecretError):
        dial(listener, bytes(32))
    assert listener.accept(0.1) is None


def test_a_server_that_does_not_know_the_secret_is_left() -> None:
    """It learns nothing that it could use: the proof holds for its own nonce only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def impostor(proof: bytes) -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"samestep 1\n" + bytes(32))
                connection.recv(64)
                connection.sendall(proof)

        for proof in (b"p" * 32, bytes(32)):
            thread = Thread(target=impostor, args=(proof,))
            thread.start()
            with pytest.raises(WrongSecretError):
                connect("127.0.0.1", server.getsockname()[1], SECRET, LIMIT, 5)
            thread.join()


def test_a_recorded_connection_is_of_no_use(listener: Listener) -> None:
    recorded = record(lambda: dial(listener).send_json({"do": "something"}))
    assert listener.accept(5) is not None
    assert len(recorded) > 64 + HEADER
    with socket.create_connection(("127.0.0.1", listener.port), 5) as again:
        again.sendall(recorded)
        answer = b""
        with suppress(ConnectionResetError):
            while received := again.recv(4096):
                answer += received
    assert answer[len(b"samestep 1\n") + 32 :] in (b"", bytes(32)), "rejected"
    assert listener.accept(0.1) is None


def test_slow_and_silent_connections_are_closed(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.5)
    began = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", listener.port)) as silent,
        socket.create_connection(("127.0.0.1", listener.port)) as slow,
    ):
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(400):  # always in time for a limit on each byte
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 15
        silent.settimeout(15)
        while silent.recv(4096):
            pass
    while listener._strangers and time.monotonic() - began < 30:
        time.sleep(0.01)
    assert not listener._strangers


def test_many_connections_from_one_address_do_not_keep_others_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_MOST_STRANGERS", 8)
    place = ("127.0.0.1", listener.port)
    early = socket.create_connection(place, source_address=("127.0.0.3", 0))
    crowd = [socket.create_connection(place, source_address=("127.0.0.2", 0)) for _ in range(20)]
    crowd[-1].recv(1)  # the server has seen all of them
    assert len(listener._strangers) <= 8
    assert "127.0.0.3" in listener._strangers.values(), "an older one of another address stays"
    with dial(listener) as client:
        client.send(b"served")
        server = listener.accept(5)
        assert server is not None
        assert server.receive(5) == b"served"
    for each in (early, *crowd):
        each.close()


@pytest.mark.parametrize("function", ["_make_room", "_challenge"])
def test_a_listener_survives_every_error(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(listener, function, lambda *_: (_ for _ in ()).throw(KeyError("x")))
        with suppress(OSError):
            dial(listener, seconds=0.5)
    with dial(listener):
        assert listener.accept(5) is not None
