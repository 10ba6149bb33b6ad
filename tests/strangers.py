"""What strangers may send to a port: malformed, huge, slow, half-open, truncated, replayed, forged.

All of it follows from a seed. `Stranger.attack` counts connections and messages, and connections
in which a port gave away more than it gives to everybody.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from unittest.mock import patch

GREETING = b"samestep 1\n"
CHALLENGE_BYTES = len(GREETING) + 32
REJECTED = bytes(32)

_OLD_MESSAGES = (
    b'{"token": "", "do": "get", "names": ["a"], "start": 0, "stop": 9}\n',
    b'{"code": 0, "reason": "the end"}\n',
    b'{"ready": 1}\n',
    b"[" * 4000 + b"\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"\n" * 1000,
)
_PATHS = (
    *("/", "/data", "/x/data", "//", "//[", "/%00", "/..%2f..%2fetc/passwd", "/../../etc/passwd"),
    *("/study/0/a", "*", "", "http://localhost/data", "/" + 70_000 * "a", "/\u00e9", "/%ff/data"),
)
_HOSTS = ("localhost", "evil.example", "[", "localhost:x", "[::1", "", 70_000 * "h", "\x01")
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "PUT", "<script>", "")


@dataclass
class Stranger:
    """Attacks the ports of one machine.

    Attributes:
        recorded: what a rightful peer has once sent to a channel, to be replayed.
        connections: number of connections that were opened.
        messages: number of times that something was sent.
        accepted: what ports have answered beside what they answer to everybody.
    """

    seed: int
    recorded: bytes = b""
    connections: int = 0
    messages: int = 0
    accepted: list[bytes] = field(default_factory=list)
    _held: list[socket.socket] = field(default_factory=list)

    def attack_channel(self, port: int, count: int) -> None:
        """Opens `count` connections to a port of `samestep.storage.channel`."""
        self._attack(port, count, self._forged, _is_rejection)

    def attack_web(self, port: int, count: int) -> None:
        """Opens `count` connections to a page of `samestep watch`."""
        self._attack(port, count, self._requests, _is_refusal)

    def leave(self) -> None:
        """Closes the connections that were left open."""
        for connection in self._held:
            connection.close()
        self._held.clear()

    def _attack(
        self,
        port: int,
        count: int,
        forge: Callable[[random.Random, bytes], Sequence[bytes]],
        is_harmless: Callable[[bytes], bool],
    ) -> None:
        chance = random.Random(f"{self.seed} {port}")
        for _ in range(count):
            with suppress(OSError):  # the port has closed the connection
                connection = socket.create_connection(("127.0.0.1", port), 10)
                self.connections += 1
                self._talk(connection, chance, forge, is_harmless)

    def _talk(
        self,
        connection: socket.socket,
        chance: random.Random,
        forge: Callable[[random.Random, bytes], Sequence[bytes]],
        is_harmless: Callable[[bytes], bool],
    ) -> None:
        how = chance.random()
        if how < 0.1:  # half-open: silent, as long as the port allows
            self._held.append(connection)
            if len(self._held) > 300:
                self._held.pop(0).close()
            return
        with connection:
            answer = b""
            connection.settimeout(0.2)
            if how > 0.3:
                with suppress(TimeoutError):  # a web server waits for the request
                    connection.settimeout(0.2 if forge == self._forged else 0.001)
                    answer = connection.recv(4096)
            connection.settimeout(2)
            with suppress(OSError):
                for part in forge(chance, answer):
                    connection.sendall(part)
                    self.messages += 1
                    if how > 0.97:
                        time.sleep(0.01)
                if how > 0.9:  # reset instead of closed
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    return
                connection.shutdown(socket.SHUT_WR)
                while received := connection.recv(2**16):
                    answer += received
            if not is_harmless(answer):
                self.accepted.append(answer[:200])

    def _forged(self, chance: random.Random, greeting: bytes) -> Sequence[bytes]:
        """Messages for a channel, in the parts in which they are sent."""
        challenge = greeting[len(GREETING) :]
        proof, tag = chance.randbytes(64), chance.randbytes(32)
        small, large = (
            (8).to_bytes(8, "little"),
            (2 ** chance.randrange(25, 63)).to_bytes(8, "little"),
        )
        kinds = (
            lambda: [chance.randbytes(chance.randrange(300))],
            lambda: [proof[: chance.randrange(64)]],  # truncated
            lambda: [proof, small + tag + b'{"a": 1}'],  # a wrong HMAC
            lambda: [proof, large + tag],  # a huge message
            lambda: [challenge + challenge],  # the port's own words
            lambda: [challenge + tag],
            lambda: [self.recorded],
            lambda: [self.recorded[: chance.randrange(1, len(self.recorded) + 1)]],
            lambda: [challenge + self.recorded[32:]],
            lambda: [chance.choice(_OLD_MESSAGES)],
            lambda: [chance.randbytes(2**16)] * 8,
            lambda: [bytes([byte]) for byte in proof],  # slow
            lambda: [REJECTED, REJECTED, bytes(64)],
        )
        return chance.choice(kinds)()

    def _requests(self, chance: random.Random, _: bytes) -> Sequence[bytes]:
        """HTTP requests, in the parts in which they are sent."""
        method, path, host = map(chance.choice, (_METHODS, _PATHS, _HOSTS))
        request = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        kinds = (
            lambda: [chance.randbytes(chance.randrange(300))],
            lambda: [request],
            lambda: [request],
            lambda: [request[: chance.randrange(len(request))]],
            lambda: [request[:-2], *(b"X-%d: y\r\n" % number for number in range(300)), b"\r\n"],
            lambda: [
                b"GET /x/data HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n",
                b"x" * 2**16,
            ],
            lambda: [chance.choice(_OLD_MESSAGES)],
            lambda: [b"GET /%x/data HTTP/1.1\r\nHost: localhost\r\n\r\n" % chance.getrandbits(64)],
            lambda: [b"x" * 2**16] * 8,
            lambda: [bytes([byte]) for byte in request[:100]],
        )
        return chance.choice(kinds)()


def record(talk: Callable[[], object]) -> bytes:
    """What this process sends over the connections that it opens while it talks."""
    sent: list[bytes] = []
    connect = socket.create_connection

    class Recorded(socket.socket):
        def sendall(self, content: bytes, *_: int) -> None:  # type: ignore[override]
            sent.append(bytes(content))
            super().sendall(content)

    def connect_recorded(*arguments: object) -> socket.socket:
        made = connect(*arguments)  # type: ignore[arg-type]
        return Recorded(made.family, made.type, fileno=made.detach())

    with patch.object(socket, "create_connection", connect_recorded):
        talk()
    return b"".join(sent)


def _is_rejection(answer: bytes) -> bool:
    """Whether a channel has only greeted, and perhaps rejected the proof."""
    return answer[CHALLENGE_BYTES:] in (b"", REJECTED)


def _is_refusal(answer: bytes) -> bool:
    """Whether a page shows nothing."""
    status = answer[:13].partition(b" ")[2][:3]
    return status not in (b"200", b"304") and b"secret loss" not in answer
