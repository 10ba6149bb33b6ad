"""Messages over TCP between processes that share a secret; strangers are turned away.

A connection begins with a challenge in both directions, so neither side talks to a stranger:

    server -> client    MAGIC, server's nonce
    client -> server    client's nonce, HMAC(secret, "client" + nonces)
    server -> client    HMAC(secret, "server" + nonces)

HMAC is HMAC-SHA256 (RFC 2104). Each direction then has a key of its own, derived from the secret
and both nonces, and each message is sent as

    length (8 bytes, little-endian), HMAC(key, number + length + SHA-256(content)), content

where `number` counts the messages of this direction. A message that is changed, repeated, left out,
or recorded in another connection does not match. Nothing is encrypted.

Until a peer has proved that it knows the secret, it costs one thread, reads 64 bytes from it, and
has a few seconds; the number of such peers is limited, too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeAlias

from samestep.stored_json import JsonError, parse_json

Content: TypeAlias = bytearray | mmap.mmap
Message: TypeAlias = dict[str, Any]
"""A JSON object; its keys say what it is about."""

SECRET_BYTES = 32
HANDSHAKE_SECONDS = 10.0

_MAGIC = b"samestep 1\n"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_REJECTED = bytes(_TAG_BYTES)  # in place of the server's HMAC
_LENGTH_BYTES = 8
_SEND_SECONDS = 10.0
_MOST_STRANGERS = 256  # connections that have not proved yet that they know the secret
_MAPPED_BYTES = 2**16
_TRIES = 3


class WrongSecretError(ConnectionAbortedError):
    """The peer speaks this protocol, but does not know the secret."""


class Channel(AbstractContextManager["Channel"]):
    """One end of a connection whose peer has proved that it knows the secret.

    Attributes:
        socket: the connection; for options and selectors only.
    """

    def __init__(
        self, connected: socket.socket, send_key: bytes, receive_key: bytes, limit: int
    ) -> None:
        # Without this, the kernel would hold back the end of a message until the peer has
        # acknowledged its begin.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._limit = connected, limit
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0  # number of messages
        self._header = bytearray(_LENGTH_BYTES + _TAG_BYTES)
        self._content: Content | None = None  # from the end of a header to the end of its message
        self._filled = 0  # bytes of the header, or of the content once there is one

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def send(self, content: bytes | memoryview, digest: bytes | None = None) -> None:
        """Sends a message.

        Args:
            content: a memoryview must be of bytes.
            digest: SHA-256 of the content, if it is known: one message for several peers is then
                hashed once.

        Raises:
            OSError: the peer is gone or takes no bytes.
        """
        if digest is None:
            digest = hashlib.sha256(content).digest()
        header = _header(self._send_key, self._sent, len(content), digest)
        self._sent += 1
        self.socket.settimeout(_SEND_SECONDS)
        if len(content) < _MAPPED_BYTES:
            self.socket.sendall(header + content)
        else:
            self.socket.sendall(header)
            self.socket.sendall(content)

    def receive(self, seconds: float) -> Content | None:
        """Returns the next message; None if no byte of it comes for `seconds`.

        A later call continues where this one has stopped.

        Raises:
            OSError: the peer is gone; a ConnectionAbortedError if the message is not authentic or
                larger than the limit.
        """
        self.socket.settimeout(seconds)
        while True:
            buffer = self._header if self._content is None else self._content
            with memoryview(buffer) as view:
                while self._filled < len(view):
                    try:
                        count = self.socket.recv_into(view[self._filled :])
                    except (TimeoutError, BlockingIOError):
                        return None
                    if count == 0:
                        raise ConnectionResetError("the peer has closed the connection")
                    self._filled += count
            self._filled = 0
            if self._content is None:
                length = int.from_bytes(self._header[:_LENGTH_BYTES], "little")
                if length > self._limit:  # before anything is allocated
                    raise ConnectionAbortedError(f"a message of {length} bytes is too large")
                self._content = _allocate(length)
            else:
                content, self._content = self._content, None
                digest = hashlib.sha256(content).digest()
                expected = _header(self._receive_key, self._received, len(content), digest)
                if not hmac.compare_digest(self._header, expected):
                    raise ConnectionAbortedError("a message was changed or repeated on its way")
                self._received += 1
                return content

    def send_json(self, message: Message) -> None:
        """Sends a JSON object as a message."""
        self.send(json.dumps(message).encode())

    def receive_json(self, seconds: float) -> Message | None:
        """Returns the next message, which must be a JSON object; see `receive`."""
        content = self.receive(seconds)
        if content is None:
            return None
        try:
            message: Message = parse_json(bytes(content), dict[str, Any])
        except JsonError as error:
            raise ConnectionAbortedError("the message is no JSON object") from error
        return message


class Listener(AbstractContextManager["Listener"]):
    """Accepts peers that know the secret. Every other connection is closed.

    Args:
        listening: where peers connect; belongs to this object from now on.
        secret: SECRET_BYTES random bytes.
        limit: greatest number of bytes in a message.

    Attributes:
        port: where it listens.
    """

    def __init__(self, listening: socket.socket, secret: bytes, limit: int) -> None:
        self._listening, self._secret, self._limit = listening, secret, limit
        self.port: int = listening.getsockname()[1]
        self._closed = False
        self._accepted: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        self._strangers: dict[socket.socket, str] = {}  # in the order of arrival; their addresses
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="listener", daemon=True).start()

    def accept(self, seconds: float | None = None) -> Channel | None:
        """Waits for the next peer; None if there is none in time, or the listener is closed.

        Args:
            seconds: None waits without an end.
        """
        try:
            return self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stops listening; connections that `accept` has returned stay open."""
        self._closed = True
        with suppress(OSError, RuntimeError):  # ends `accept` in the other thread
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        while (channel := self.accept(0)) is not None:
            channel.close()
        self._accepted.put(None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed:
            # Closed, too many open files or threads, or the peer is gone already: whatever it is,
            # it must not end this thread, or peers would connect and wait.
            try:
                self._accept_one()
            except Exception:
                time.sleep(0.01)
        self._accepted.put(None)

    def _accept_one(self) -> None:
        connection, address = self._listening.accept()
        try:
            with self._lock:
                self._strangers[connection] = address[0]
                self._make_room()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        except BaseException:
            self._is_waiting(connection)
            connection.close()
            raise

    def _make_room(self) -> None:
        """Drops a connection if there are too many: the oldest of the address that has most.

        So connections from one address, however many, do not keep others out.
        """
        if len(self._strangers) > _MOST_STRANGERS:
            ((crowded, _),) = Counter(self._strangers.values()).most_common(1)
            oldest = next(peer for peer, place in self._strangers.items() if place == crowded)
            del self._strangers[oldest]
            with suppress(OSError):  # ends the thread that waits for it, which closes it
                oldest.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket) -> None:
        try:
            channel = self._challenge(connection)
        except Exception:
            channel = None
        # A connection that was dropped meanwhile may have been shut down after its last message.
        if self._is_waiting(connection) and channel is not None and not self._closed:
            self._accepted.put(channel)
        else:
            connection.close()

    def _challenge(self, connection: socket.socket) -> Channel:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.sendall(_MAGIC + nonce)
        answer = _read(connection, _NONCE_BYTES + _TAG_BYTES, deadline)
        nonces, proof = nonce + answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._mac(b"client", nonces)):
            # An answer, because a connection that just ends may be tried again.
            connection.sendall(_REJECTED)
            raise WrongSecretError("the peer does not know the secret")
        connection.sendall(self._mac(b"server", nonces))
        keys = self._mac(b"from server", nonces), self._mac(b"from client", nonces)
        return Channel(connection, *keys, self._limit)

    def _mac(self, purpose: bytes, nonces: bytes) -> bytes:
        return derive(self._secret, purpose + nonces)

    def _is_waiting(self, connection: socket.socket) -> bool:
        """Whether a connection was not dropped; it does not count as a stranger's any more."""
        with self._lock:
            return self._strangers.pop(connection, None) is not None


def connect(host: str, port: int, secret: bytes, limit: int, seconds: float) -> Channel:
    """Connects to a `Listener` that knows the secret.

    Args:
        limit: greatest number of bytes in a message.
        seconds: for the connection and for the listener's greeting.

    Raises:
        OSError: it cannot be reached; a WrongSecretError if it does not know the secret, a
            ConnectionAbortedError if it speaks another protocol.
    """
    # A listener that is flooded with connections drops some, which may be this one.
    for _ in range(_TRIES - 1):
        with suppress(ConnectionResetError, BrokenPipeError):
            return _connect(host, port, secret, limit, seconds)
        time.sleep(0.05)
    return _connect(host, port, secret, limit, seconds)


def _connect(host: str, port: int, secret: bytes, limit: int, seconds: float) -> Channel:
    connection = socket.create_connection((host, port), seconds)
    deadline = time.monotonic() + seconds
    try:
        try:
            magic = _read(connection, len(_MAGIC), deadline)
        except TimeoutError as error:
            raise ConnectionAbortedError("the peer sends no greeting") from error
        if magic != _MAGIC:
            raise ConnectionAbortedError("the peer speaks another protocol")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = _read(connection, _NONCE_BYTES, deadline) + nonce
        connection.sendall(nonce + derive(secret, b"client" + nonces))
        proof = _read(connection, _TAG_BYTES, deadline)
        if proof == _REJECTED:
            raise WrongSecretError("the peer has another secret")
        if not hmac.compare_digest(proof, derive(secret, b"server" + nonces)):
            raise WrongSecretError("the peer does not know the secret")
        keys = derive(secret, b"from client" + nonces), derive(secret, b"from server" + nonces)
        return Channel(connection, *keys, limit)
    except BaseException:
        connection.close()
        raise


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Returns another secret for one purpose, which does not reveal the first."""
    return hmac.digest(secret, purpose, "sha256")


def _header(key: bytes, number: int, length: int, digest: bytes) -> bytes:
    size = length.to_bytes(_LENGTH_BYTES, "little")
    return size + hmac.digest(key, number.to_bytes(8, "little") + size + digest, "sha256")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Reads `count` bytes until the deadline, however slowly they come."""
    content = b""
    while len(content) < count:
        # Not 0, which would make the socket non-blocking.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(count - len(content))
        if not received:
            raise ConnectionResetError("the peer has closed the connection")
        content += received
        if time.monotonic() > deadline:
            raise TimeoutError("the peer is too slow")
    return content


def _allocate(size: int) -> Content:
    # Unlike heap memory, the kernel gets a mapping back at once when the last reference is gone.
    return mmap.mmap(-1, size) if size >= _MAPPED_BYTES else bytearray(size)
