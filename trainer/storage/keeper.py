"""Named bytes in the memory of a process that outlives those that write and read them, over TCP.

A request is one line of JSON, `{"token": ..., "do": "put", "name": ...}`, and so is the answer. After a `put` the
content follows in frames, each its length in 8 bytes and so many bytes, and ends with a frame of none; the name appears
once all are there. The bytes that a `get` asks for follow the answer. Each connection serves one request.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import BinaryIO, TypeAlias, TypeVar

logger = logging.getLogger(__name__)

Blob: TypeAlias = list[mmap.mmap]
Answer: TypeAlias = dict[str, int] | list[bool] | int | None
Buffer = TypeVar("Buffer", bytearray, mmap.mmap)

ENVIRONMENT = "SAMESTEP_KEEPER"
"""The variable that tells a process the address of its machine's keeper."""

_WAIT_SECONDS = 10.0  # for the other side, at any moment
_REQUEST_BYTES = 4096
_LOOPBACK = ("127.0.0.1", "localhost")


class Keeper:
    """Serves named bytes from this process's memory, until it is closed or the process ends. Threads do the work.

    Args:
        host: by which others reach this machine. Where it is the loopback's, nobody else does.

    Attributes:
        address: what `ask` and `put` need to know, a secret among it: who has none gets no answer.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._server = _Server(("127.0.0.1" if host in _LOOPBACK else "", 0), _Handler)
        self.address = f"{host} {self._server.server_address[1]} {self._server.token}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="keeper", daemon=True
        )
        self._thread.start()

    @property
    def bytes(self) -> int:
        """How much it holds."""
        return sum(map(_length, list(self._server.blobs.values())))

    def close(self) -> None:
        """Forgets everything."""
        self._server.shutdown()
        self._server.server_close()
        self._server.blobs.clear()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def asking(address: str, do: str, name: str, **details: int) -> Iterator[tuple[Answer, BinaryIO]]:
    """Asks the keeper at an address.

    Args:
        address: of a `Keeper`.
        do: `find` the sizes of what has this name or lies in the folder of this name; `remove` the same; `get` the
            bytes `start` to `stop`.
        name: folders are divided by slashes.
        details: of the request.

    Yields:
        The answer, and a file to read the bytes from. The answer is sizes by name (`find`), whether each
        name existed (`remove`), or the size of the whole, None if the name does not exist (`get`).

    Raises:
        OSError: there is no answer.
    """
    with connect(address, do, name, **details) as connection, connection.makefile("rb") as answer:
        yield _answer(answer), answer


class Put:
    """Content on its way into several keepers at once; it appears in each one when it is closed."""

    def __init__(self, addresses: tuple[str, ...], name: str) -> None:
        self.closed = False
        self._connections = [connect(address, "put", name) for address in addresses]

    def write(self, content: bytes | memoryview) -> None:
        """Sends more of it; bytes only."""
        for connection in self._connections:
            connection.sendall(len(content).to_bytes(8, "little"))
            connection.sendall(content)

    def close(self) -> None:
        """Returns when all keepers have everything.

        Raises:
            OSError: one does not answer; others may have it.
        """
        for connection in self._connections:
            connection.sendall(bytes(8))
        for connection in self._connections:
            with connection.makefile("rb") as answer:
                _answer(answer)
        self.discard()

    def discard(self) -> None:
        """Breaks off: keepers that do not have everything yet forget the rest."""
        self.closed = True
        for connection in self._connections:
            connection.close()


def connect(address: str, do: str, name: str, **details: int) -> socket.socket:
    """Sends the line of a request."""
    host, port, token = address.split()
    connection = socket.create_connection((host, int(port)), _WAIT_SECONDS)
    connection.sendall(
        json.dumps({"token": token, "do": do, "name": name, **details}).encode() + b"\n"
    )
    return connection


def _answer(answer: BinaryIO) -> Answer:
    line = answer.readline()
    if not line:
        raise ConnectionError("the keeper hung up")
    found: Answer = json.loads(line)
    return found


class _Server(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[StreamRequestHandler]) -> None:
        super().__init__(address, handler)
        self.token = secrets.token_hex(16)
        self.blobs: dict[str, Blob] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Others may be killed while they write or read, which is nothing to report."""
        logger.debug("a request from %s has failed", client_address, exc_info=True)


class _Handler(StreamRequestHandler):
    server: _Server
    timeout = _WAIT_SECONDS

    def handle(self) -> None:
        request = json.loads(self.rfile.readline(_REQUEST_BYTES))
        if not hmac.compare_digest(request["token"], self.server.token):
            return
        blobs, name = self.server.blobs, request["name"]
        match request["do"]:
            case "put":
                blobs[name] = self._receive()
                self._say(None)
            case "get":
                blob = blobs.get(name)
                self._say(None if blob is None else _length(blob))
                for part in _range(blob or [], request["start"], request["stop"]):
                    self.request.sendall(part)
            case "find":
                self._say({each: _length(blobs[each]) for each in self._in(name)})
            case "remove":
                self._say([blobs.pop(each, None) is not None for each in self._in(name)])

    def _in(self, name: str) -> list[str]:
        return [
            each for each in list(self.server.blobs) if each == name or each.startswith(f"{name}/")
        ]

    def _say(self, answer: Answer) -> None:
        self.request.sendall(json.dumps(answer).encode() + b"\n")

    def _receive(self) -> Blob:
        """Memory of its own for each frame: the system has it back as soon as nobody needs it."""
        blob = []
        while size := int.from_bytes(self._exactly(bytearray(8)), "little"):
            frame = mmap.mmap(-1, size)
            self._exactly(frame)
            blob.append(frame)
        return blob

    def _exactly(self, buffer: Buffer) -> Buffer:
        if self.rfile.readinto(buffer) != len(buffer):
            raise ConnectionError("hung up in the middle")
        return buffer


def _length(blob: Blob) -> int:
    return sum(map(len, blob))


def _range(blob: Blob, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes [start, stop), in parts."""
    for frame in blob:
        if start < len(frame) and stop > 0:
            yield memoryview(frame)[max(0, start) : stop]
        start, stop = start - len(frame), stop - len(frame)
