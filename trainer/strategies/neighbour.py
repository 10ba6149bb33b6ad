"""The next rank, watched: the kernel tells at once when a process dies, whatever collective the
others wait in.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_KEEPALIVE = {
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 5,
}  # a machine without power is noticed in 7 s


class Neighbour:
    """Each rank connects to the next, so that together they watch each other.

    Nothing is sent over the connections.

    Nor are they accepted: the kernel completes them as long as there is a listener, and resets them
        when it goes.

    Args:
        store: where ranks say how they can be reached.
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = (rank + 1) % size
        self._store = store
        self._connection: socket.socket | None = None
        self._watchable = size > 1
        self._listener = socket.create_server(("", 0), backlog=1)
        address = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store.set(f"address/{rank}", f"{address} {self._listener.getsockname()[1]}")

    def dies_within(self, seconds: float) -> bool:
        """Waits for so long, or until the next rank has ended, in whichever way."""
        if self._connection is None and self._watchable:
            self._connect()
        if self._connection is None:
            time.sleep(seconds)
            return False
        self._connection.settimeout(seconds)
        try:
            self._connection.recv(1)
        except TimeoutError:
            return False
        except OSError:  # reset
            pass
        self._connection = None
        self._watchable = False
        return True

    def close(self) -> None:
        """Lets go of both ends; the rank before this one takes that for the end of this process."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        if not self._store.check([f"address/{self.rank}"]):
            return
        host, port = self._store.get(f"address/{self.rank}").decode().split()
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError as error:
            logger.info("rank %d at %s cannot be watched: %s", self.rank, host, error)
            self._watchable = False
            return
        keep_alive(connection)
        self._connection = connection


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find out within seconds that the machine at the other end is gone without a
    word.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # not all of them on macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def own_address(host: str, port: int) -> str:
    """The address of this machine for those that reach another one, or this one, as `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own, peer = probe.getsockname()[0], probe.getpeername()[0]
    # Debian's /etc/hosts gives a machine's own name an address that leads nowhere from the others.
    return host if own == peer or own.startswith("127.") else str(own)
