"""Watches the next rank: the kernel reports at once when a process dies, even in a collective."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1")
"""Hosts that stand for this machine alone."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface of collectives; our own ports use it, too."""

_CONNECT_SECONDS = 5.0
# A machine that loses power is detected after 2 + 5 x 1 = 7 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}


class Neighbor:
    """A TCP connection from each rank to the next; together they watch all ranks.

    With 3 ranks, 0 watches 1, 1 watches 2, and 2 watches 0. Nothing is sent, and no connection is
    accepted: the kernel completes a connection as long as the listening socket exists, and resets
    it when the process ends.

    Args:
        store: where ranks publish their addresses.
        rank: of this process.
        size: number of ranks.

    Attributes:
        rank: of the process that is watched.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = (rank + 1) % size
        self._store = store
        self._connection: socket.socket | None = None
        self._watchable = size > 1
        host = os.environ["MASTER_ADDR"]
        self._listener = socket.create_server((own_interface(host), 0), backlog=1)
        address = own_address(host, int(os.environ["MASTER_PORT"]))
        store.set(f"address/{rank}", f"{address} {self._listener.getsockname()[1]}")

    def dies_within(self, seconds: float) -> bool:
        """Waits for `seconds`; returns True early if the next rank's process ends."""
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
        except OSError:  # the connection was reset
            pass
        self._connection = None
        self._watchable = False
        return True

    def close(self) -> None:
        """Closes both ends. To the previous rank, this process has ended."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        if not self._store.check([f"address/{self.rank}"]):
            return  # it has not started yet
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
    """Makes the kernel detect within seconds that the other machine has lost power or network."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # macOS has only some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def own_address(host: str, port: int) -> str:
    """The address of this machine that is valid for machines that can reach `host`."""
    own, peer = _route(host, port)
    # If `host` is this machine, its name is valid everywhere, but not the address that it resolves
    # to here: Debian's /etc/hosts maps a machine's own name to 127.0.1.1.
    return host if own == peer or own.startswith("127.") else own


def own_interface(host: str) -> str:
    """Address of the interface on which this machine listens for machines that can reach `host`.

    Returns:
        The loopback's address if `host` is the loopback, so nobody else can connect; "", which is
        all interfaces, if `host` is another name of this machine. On other machines, the address of
        the interface that leads to `host`. A named interface goes first, except on the loopback.

    Raises:
        ConfigError: the named interface does not exist, or has no address.
        OSError: the address of `host` is unknown.
    """
    if host in LOOPBACK:
        return "127.0.0.1"
    if named := _named_interface():
        return named
    own, _ = _route(host, 1)
    # Other machines may reach this one at another address than its name has here.
    return "" if _is_here(host) or ":" in own else own


def reachable(host: str) -> str:
    """The address at which this machine reaches `host`.

    That is `host`, unless it is this machine and listens on a named interface only.
    """
    if host in LOOPBACK or not (named := _named_interface()):
        return host
    return named if _is_here(host) else host


def loopback_only(host: str) -> dict[str, str]:
    """Environment variables with which collectives of a single machine listen on its loopback."""
    is_known = host in LOOPBACK and sys.platform == "linux" and INTERFACE not in os.environ
    return {INTERFACE: "lo"} if is_known else {}


def _is_here(host: str) -> bool:
    own, peer = _route(host, 1)
    return own == peer or own.startswith("127.")


def _named_interface() -> str:
    """The IPv4 address of the interface that the user names; "" if none is named."""
    name = os.environ.get(INTERFACE, "").partition(",")[0]
    if not name or sys.platform != "linux":
        return ""
    import fcntl

    # netdevice(7): the request is a struct ifreq, whose address begins at byte 20.
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ConfigError(
                f"{INTERFACE} is {name}, which is no network interface with an IPv4 address "
                f"({error.strerror}). Name one that `ip -4 address` lists."
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _route(host: str, port: int) -> tuple[str, str]:
    """Addresses of this machine's and the other end of a connection to `host`."""
    # Connecting a datagram socket sends nothing.
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])
