"""Snapshots in the memory of agents, which outlive workers: a TCP server and its fsspec store.

Each agent of an elastic run holds one `Keeper`. Workers write to two keepers, so a snapshot
survives the loss of a worker or of one machine, and reads come from the first keeper that answers.

The protocol serves one request per connection. A request is a line of JSON such as
`{"token": ..., "do": "put", "name": ...}`. The answer is a line of JSON: the size in bytes of each
blob that the request matched, by name. After a `put` line the content follows in frames, each a
length in 8 bytes (little-endian) and that many bytes; an empty frame ends it, and the name appears
only then. After the answer to a `get` follow the requested bytes.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import BinaryIO, TypeAlias

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

logger = logging.getLogger(__name__)

Blob: TypeAlias = list[mmap.mmap]
Entry: TypeAlias = dict[str, str | int]
Sizes: TypeAlias = dict[str, int]

ENVIRONMENT = "SAMESTEP_KEEPER"
"""Environment variable with the address of the keeper on a worker's machine."""
COPIES = 2
"""Number of keepers that hold each blob."""

_TIMEOUT_SECONDS = 10.0  # without progress by the other side
_REQUEST_BYTES = 4096
_LOOPBACK = ("127.0.0.1", "localhost")


class Keeper(AbstractContextManager["Keeper"]):
    """Serves named blobs from this process's memory, in threads, until it is closed.

    Args:
        host: name or address by which other machines reach this one. With a loopback address,
            only this machine can connect.

    Attributes:
        address: HOST PORT TOKEN. The token is a secret: requests without it get no answer.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._server = _Server(("127.0.0.1" if host in _LOOPBACK else "", 0), _Handler)
        self.address = f"{host} {self._server.server_address[1]} {self._server.token}"
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="keeper", daemon=True).start()

    @property
    def bytes(self) -> int:
        """Total size of all blobs."""
        return sum(map(_length, list(self._server.blobs.values())))

    def close(self) -> None:
        """Stops serving and frees all blobs."""
        self._server.shutdown()
        self._server.server_close()
        self._server.blobs.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[StreamRequestHandler]) -> None:
        super().__init__(address, handler)
        self.token = secrets.token_hex(16)
        self.blobs: dict[str, Blob] = {}

    def handle_error(self, request: object, client_address: object) -> None:
        """Workers may be killed while they write or read, which is nothing to report."""
        logger.debug("a request from %s has failed", client_address, exc_info=True)


class _Handler(StreamRequestHandler):
    server: _Server
    timeout = _TIMEOUT_SECONDS

    def handle(self) -> None:
        request = json.loads(self.rfile.readline(_REQUEST_BYTES))
        if not hmac.compare_digest(request["token"], self.server.token):
            return
        blobs, do, name = self.server.blobs, request["do"], request["name"]
        # `list` copies in one step: other threads add and remove blobs meanwhile.
        matches = {
            key: blob
            for key, blob in list(blobs.items())
            if key == name or key.startswith(f"{name}/")
        }
        if do == "put":
            blobs[name] = self._receive_blob()
        elif do == "remove":
            for key in matches:
                blobs.pop(key, None)
        sizes = {key: _length(blob) for key, blob in matches.items()}
        self.request.sendall(json.dumps(sizes).encode() + b"\n")
        if do == "get":
            for part in _range(matches.get(name, []), request["start"], request["stop"]):
                self.request.sendall(part)

    def _receive_blob(self) -> Blob:
        # One anonymous mapping per frame: unlike heap memory, the kernel gets it back at once
        # when the last reference is gone.
        blob: Blob = []
        length = bytearray(8)
        while True:
            self._fill(length)
            size = int.from_bytes(length, "little")
            if size == 0:
                return blob
            frame = mmap.mmap(-1, size)
            self._fill(frame)
            blob.append(frame)

    def _fill(self, buffer: bytearray | mmap.mmap) -> None:
        if self.rfile.readinto(buffer) != len(buffer):
            raise ConnectionError("the client closed the connection within a frame")


def _length(blob: Blob) -> int:
    return sum(map(len, blob))


def _range(blob: Blob, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes [start, stop) of a blob, frame by frame.

    With frames of 4 and 3 bytes, [2, 6) is [2, 4) of the first frame and [0, 2) of the second.
    """
    for frame in blob:
        if start < len(frame) and stop > 0:
            yield memoryview(frame)[max(0, start) : stop]
        start, stop = start - len(frame), stop - len(frame)


def request(address: str, do: str, name: str, start: int = 0, stop: int = 0) -> tuple[Sizes, bytes]:
    """Sends a request to the keeper at an address.

    Args:
        do: `find` matches the blob or the folder of this name; `remove` removes the same; `get`
            reads the bytes [start, stop) of a blob.
        name: folders are separated by slashes.

    Returns:
        The size of each match by name, and the bytes of a `get`.

    Raises:
        OSError: the keeper does not answer, or only in part.
    """
    with (
        _connect(address, do, name, start=start, stop=stop) as connection,
        connection.makefile("rb") as answer,
    ):
        sizes = _read_sizes(answer)
        wanted = max(0, min(stop, sizes.get(name, 0)) - start)
        content = answer.read(wanted)
    if len(content) != wanted:
        raise ConnectionError(f"{len(content)} of {wanted} bytes came")
    return sizes, content


class Upload:
    """A file that is written to several keepers at once; it appears in each when it is closed."""

    def __init__(self, addresses: tuple[str, ...], name: str) -> None:
        self.closed = False
        self._connections = [_connect(address, "put", name) for address in addresses]

    def write(self, content: bytes | memoryview) -> None:
        """Sends one frame; a memoryview must be of bytes."""
        for connection in self._connections:
            connection.sendall(len(content).to_bytes(8, "little"))
            connection.sendall(content)

    def close(self) -> None:
        """Sends the last frame and waits until all keepers confirm.

        Raises:
            OSError: a keeper does not answer; others may have the file.
        """
        # End the content everywhere first: the keepers then work at the same time.
        for connection in self._connections:
            connection.sendall(bytes(8))
        for connection in self._connections:
            with connection.makefile("rb") as answer:
                _read_sizes(answer)
        self.discard()

    def discard(self) -> None:
        """Closes the connections; keepers that do not have the whole file forget it."""
        self.closed = True
        for connection in self._connections:
            connection.close()


def _connect(address: str, do: str, name: str, **details: int) -> socket.socket:
    host, port, token = address.split()
    connection = socket.create_connection((host, int(port)), _TIMEOUT_SECONDS)
    line = json.dumps({"token": token, "do": do, "name": name, **details})
    connection.sendall(line.encode() + b"\n")
    return connection


def _read_sizes(answer: BinaryIO) -> Sizes:
    line = answer.readline()
    if not line:
        raise ConnectionError("the keeper closed the connection")
    sizes: Sizes = json.loads(line)
    return sizes


def use(keepers: Sequence[str], own: int) -> str:
    """Registers keeper:// URLs for this process.

    Args:
        keepers: addresses of all keepers, in the same order in every process.
        own: index of the keeper on this machine. This process writes to it and to the next one.

    Returns:
        The URL of the folder for snapshots.
    """
    fsspec.register_implementation("keeper", KeeperFileSystem, clobber=True)
    fsspec.config.conf["keeper"] = {"keepers": (*keepers[own:], *keepers[:own])}
    return "keeper://snapshots"


def is_keeper_url(url: str) -> bool:
    """Whether a URL is served by keepers, which answer as fast as a local disk."""
    return url.startswith("keeper:")


class KeeperFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The keepers as an fsspec store. A keeper that does not answer counts as empty.

    Args:
        keepers: addresses, the nearest first.
    """

    protocol = "keeper"

    def __init__(self, keepers: Sequence[str], **options: object) -> None:
        super().__init__(**options)
        self.keepers = tuple(keepers)

    def info(self, path: str, **_: object) -> dict[str, str | int]:
        for sizes, _content in self._ask_each("find", path):
            if path in sizes:
                return {"name": path, "size": sizes[path], "type": "file"}
            if sizes:
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[str] | list[Entry]:
        found: dict[str, int] = {}
        for sizes, _content in self._ask_each("find", path):
            found |= sizes
        if not found:
            raise FileNotFoundError(path)
        # For `a`, both `a/b/c` and `a/b/d` are listed as `a/b`.
        below = len(path) + 1
        names = sorted({name[:below] + name[below:].partition("/")[0] for name in found})
        if not detail:
            return names
        return [
            {
                "name": name,
                "size": found.get(name, 0),
                "type": "file" if name in found else "directory",
            }
            for name in names
        ]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        stop = 2**63 if end is None else end
        for sizes, content in self._ask_each("get", path, start or 0, stop):
            if path in sizes:
                return content
        raise FileNotFoundError(path)

    def rm_file(self, path: str) -> None:
        for _ in self._ask_each("remove", path):
            pass

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        for each in [path] if isinstance(path, str) else path:
            self.rm_file(each)

    def _open(self, path: str, mode: str = "rb", **_: object) -> Upload | _File:
        if mode == "wb":
            return Upload(self.keepers[:COPIES], path)
        return _File(self, path, cache_type="none")

    def _ask_each(
        self, do: str, path: str, start: int = 0, stop: int = 0
    ) -> Iterator[tuple[Sizes, bytes]]:
        for keeper in self.keepers:
            try:
                yield request(keeper, do, path, start, stop)
            except OSError as error:
                host_and_port = ":".join(keeper.split()[:2])  # not the token
                logger.info("the keeper at %s does not answer: %s", host_and_port, error)


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content
