"""Snapshots in the memory of agents, which outlive workers: a TCP server and its fsspec store.

Each agent of an elastic run holds one `Keeper`. Workers write to two keepers, so a snapshot
survives the loss of a worker or of one machine, and reads come from the first keeper that answers.

The protocol serves one request per connection, in messages of a `Channel`, so only processes that
know the secret get an answer. A request is a JSON object such as `{"do": "put", "names": [...]}`.
The answer is a JSON object: the size in bytes of each blob that the request matched, by name. After
a `put` the content follows in messages; an empty one ends it, and the name appears only then. After
the answer to a `get` follow messages with the requested bytes, in the order of the names.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from samestep.storage.channel import Channel, Content, Listener, Message, connect
from samestep.storage.local import CHUNK_BYTES
from samestep.stored_json import Count, JsonError, checked

logger = logging.getLogger(__name__)

Blob: TypeAlias = list[Content]
Entry: TypeAlias = dict[str, str | int]
Sizes: TypeAlias = dict[str, int]

SECRET_ENVIRONMENT = "SAMESTEP_KEEPER_SECRET"
"""Environment variable with the secret of all keepers of the run, in hexadecimal digits."""
COPIES = 2
"""Number of keepers that hold each blob."""

_TIMEOUT_SECONDS = 10.0  # without progress by the other side
_END = 2**63  # of any blob


class Keeper(AbstractContextManager["Keeper"]):
    """Serves named blobs from this process's memory, in threads, until it is closed.

    Args:
        secret: of the run; requests of processes that do not know it get no answer.
        host: name or address by which other machines reach this one.
        interface: address of the interface to listen on; "" listens on all of them.

    Attributes:
        address: HOST PORT.
    """

    def __init__(
        self, secret: bytes, host: str = "127.0.0.1", interface: str = "127.0.0.1"
    ) -> None:
        listening = socket.create_server((interface, 0), backlog=128)
        self._listener = Listener(listening, secret, CHUNK_BYTES)
        self._blobs: dict[str, Blob] = {}
        self.address = f"{host} {self._listener.port}"
        threading.Thread(target=self._run, name="keeper", daemon=True).start()

    @property
    def bytes(self) -> int:
        """Total size of all blobs."""
        return sum(map(_length, list(self._blobs.values())))

    def close(self) -> None:
        """Stops serving and frees all blobs."""
        self._listener.close()
        self._blobs.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        # A thread for each connection: a worker may take minutes to send a shard.
        while (channel := self._listener.accept()) is not None:
            try:
                threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
            except Exception as error:  # no more threads now; later requests may be served
                logger.warning("a request for snapshots in memory is dropped: %s", error)
                channel.close()

    def _serve(self, channel: Channel) -> None:
        with channel:
            try:
                self._answer(channel, _expect_json(channel))
            except OSError:  # workers may be killed while they write or read
                pass
            except Exception as error:  # no more memory, or a request of another version
                logger.warning("a request for snapshots in memory fails: %r", error)

    def _answer(self, channel: Channel, request: Message) -> None:
        do, names = request["do"], request["names"]
        # As in an object store, a folder is a prefix of names.
        exact, folders = set(names), tuple(f"{name}/" for name in names)
        # `list` copies in one step: other threads add and remove blobs meanwhile.
        matches = {
            key: blob
            for key, blob in list(self._blobs.items())
            if key in exact or key.startswith(folders)
        }
        if do == "put":
            # Assigned when all of it has come, so a file is never there in part.
            self._blobs[names[0]] = _receive_blob(channel)
        elif do == "remove":
            for key in matches:
                self._blobs.pop(key, None)
        channel.send_json({key: _length(blob) for key, blob in matches.items()})
        if do == "get":
            for name in names:
                for part in _range(matches.get(name, []), request["start"], request["stop"]):
                    channel.send(part)


def _receive_blob(channel: Channel) -> Blob:
    blob: Blob = []
    while frame := _expect(channel):
        blob.append(frame)
    return blob


def _expect(channel: Channel) -> Content:
    content = channel.receive(_TIMEOUT_SECONDS)
    if content is None:
        raise TimeoutError("the other side makes no progress")
    return content


def _expect_json(channel: Channel) -> Message:
    message = channel.receive_json(_TIMEOUT_SECONDS)
    if message is None:
        raise TimeoutError("the other side makes no progress")
    return message


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


def request(
    address: str, secret: bytes, do: str, names: Sequence[str], start: int = 0, stop: int = 0
) -> tuple[Sizes, bytes]:
    """Sends a request to the keeper at an address.

    Args:
        do: `find` matches the blobs and the folders of these names; `remove` removes the same;
            `get` reads the bytes [start, stop) of each blob.
        names: folders are separated by slashes.

    Returns:
        The size of each match by name, and the bytes of a `get`, all blobs in one.

    Raises:
        OSError: the keeper does not answer, or only in part.
    """
    with _connect(address, secret, do, names, start=start, stop=stop) as channel:
        try:
            sizes: Sizes = checked(_expect_json(channel), dict[str, Count])
        except JsonError as error:
            raise ConnectionAbortedError(f"the answer of the keeper is wrong: {error}") from error
        # Bytes, not frames, as only the keeper knows where frames end.
        wanted = sum(max(0, min(stop, sizes.get(name, 0)) - start) for name in names)
        parts: list[Content] = []
        while sum(map(len, parts)) < wanted:
            parts.append(_expect(channel))
    return sizes, b"".join(parts)


class Upload:
    """A file that is written to several keepers at once; it appears in each when it is closed."""

    def __init__(self, addresses: tuple[str, ...], secret: bytes, name: str) -> None:
        self.closed = False
        self._channels = [_connect(address, secret, "put", [name]) for address in addresses]

    def write(self, content: bytes | memoryview) -> None:
        """Sends at most CHUNK_BYTES; a memoryview must be of bytes."""
        if not len(content):  # would end the file
            return
        digest = hashlib.sha256(content).digest()
        for channel in self._channels:
            channel.send(content, digest)

    def close(self) -> None:
        """Sends the end of the file and waits until all keepers confirm.

        Raises:
            OSError: a keeper does not answer; others may have the file.
        """
        # End the content everywhere first: the keepers then work at the same time.
        for channel in self._channels:
            channel.send(b"")
        for channel in self._channels:
            _expect_json(channel)
        self.discard()

    def discard(self) -> None:
        """Closes the connections; keepers that do not have the whole file forget it."""
        self.closed = True
        for channel in self._channels:
            channel.close()


def _connect(address: str, secret: bytes, do: str, names: Sequence[str], **details: int) -> Channel:
    host, port = address.split()
    channel = connect(host, int(port), secret, CHUNK_BYTES, _TIMEOUT_SECONDS)
    channel.send_json({"do": do, "names": names, **details})
    return channel


def own_secret() -> bytes:
    """The secret of the run's keepers, which the agent gave to this worker."""
    return bytes.fromhex(os.environ[SECRET_ENVIRONMENT])


def use(keepers: Sequence[str], own: int, secret: bytes) -> str:
    """Registers keeper:// URLs for this process.

    Args:
        keepers: addresses of all keepers, in the same order in every process.
        own: index of the keeper on this machine. This process writes to it and to the next one.
        secret: of all keepers.

    Returns:
        The URL of the folder for snapshots.
    """
    # In each process anew, as addresses change with the machines of a run.
    fsspec.register_implementation("keeper", KeeperFileSystem, clobber=True)
    options = {"keepers": (*keepers[own:], *keepers[:own]), "secret": secret}
    fsspec.config.conf["keeper"] = options
    return "keeper://snapshots"


class KeeperFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The keepers as an fsspec store. A keeper that does not answer counts as empty.

    Args:
        keepers: addresses, the nearest first.
        secret: of all keepers.
    """

    protocol = "keeper"

    def __init__(self, keepers: Sequence[str], secret: bytes, **options: object) -> None:
        super().__init__(**options)
        self.keepers, self._secret = tuple(keepers), secret

    def info(self, path: str, **_: object) -> dict[str, str | int]:
        for sizes, _content in self._ask_each("find", [path]):
            if path in sizes:
                return {"name": path, "size": sizes[path], "type": "file"}
            if sizes:
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[str] | list[Entry]:
        found: dict[str, int] = {}
        for sizes, _content in self._ask_each("find", [path]):
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
        stop = _END if end is None else end
        for sizes, content in self._ask_each("get", [path], start or 0, stop):
            if path in sizes:
                return content
        raise FileNotFoundError(path)

    def cat_files(self, paths: Sequence[str]) -> list[bytes]:
        """Reads several blobs. Each keeper is asked once for all, and not for each one."""
        found: dict[str, bytes] = {}
        for sizes, content in self._ask_each("get", paths, 0, _END):
            file = io.BytesIO(content)
            found |= {path: file.read(sizes[path]) for path in paths if path in sizes}
            if len(found) == len(paths):
                break
        if missing := [path for path in paths if path not in found]:
            raise FileNotFoundError(missing[0])
        return [found[path] for path in paths]

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def rm(
        self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None
    ) -> None:
        for _ in self._ask_each("remove", [path] if isinstance(path, str) else path):
            pass

    def _open(self, path: str, mode: str = "rb", **_: object) -> Upload | _File:
        if mode == "wb":
            # The nearest keepers come first: this machine's and its neighbor's.
            return Upload(self.keepers[:COPIES], self._secret, path)
        return _File(self, path, cache_type="none")

    def _ask_each(
        self, do: str, paths: Sequence[str], start: int = 0, stop: int = 0
    ) -> Iterator[tuple[Sizes, bytes]]:
        for keeper in self.keepers:
            try:
                yield request(keeper, self._secret, do, paths, start, stop)
            except OSError as error:
                logger.info("the keeper at %s does not answer: %s", keeper, error)


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content
