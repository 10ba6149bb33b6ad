"""Watches the next rank: the kernel reports at once when a process dies, even in a collective."""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
import struct
import sys
import time
from ipaddress import IPv4Address

from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.environment import open_files
from samestep.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK = ("localhost", "127.0.0.1")
"""Hosts that stand for this machine alone."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface of collectives; ports of ranks are on it, too."""

_CONNECT_SECONDS = 5.0
_PROBE_SECONDS, _PROBES_SECONDS = 3.0, 20.0  # for one machine, and for all
_MOST_CONNECTIONS = 1024  # to a rank; they wait in the kernel, as nobody accepts them
_MOST_PROBED = 32  # machines, by each machine: its probes wait there, too
# Of a rank to the process that hosts the store: with gloo, and with NCCL and data.on_corrupt=skip.
FEWEST_CONNECTIONS, CONNECTIONS = 3, 7
OTHER_FILES = 256  # of a process that hosts the store, or connects to all ranks
# A machine that loses power is detected after 2 + 5 x 1 = 7 s. Keep-alives are not sent while sent
# data has no answer; the last option limits that time, in milliseconds.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 5,
    "TCP_USER_TIMEOUT": 7000,
}


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
        address = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._listener = socket.create_server((interface_of(address), 0), backlog=_MOST_CONNECTIONS)
        port = self._listener.getsockname()[1]
        store.set(_address(rank), f"{address} {port} {platform.node() or '?'}")

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
        if not self._store.check([_address(self.rank)]):
            return  # it has not started yet
        host, port = self._store.get(_address(self.rank)).decode().split()[:2]
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError as error:
            logger.info("rank %d at %s cannot be watched: %s", self.rank, host, error)
            self._watchable = False
            return
        keep_alive(connection)
        self._connection = connection


def unreachable(store: Store, rank: int, size: int, reached: set[str]) -> str:
    """Names machines that this rank cannot connect to, by one rank of each; "" if there is none.

    It tries the machines of the ranks that follow.

    Args:
        store: where ranks publish their addresses; nothing is tried before all have.
        rank: of this process.
        size: number of ranks.
        reached: hosts that need no other try; those that answer are added.
    """
    deadline = time.monotonic() + _PROBES_SECONDS
    others = [(rank + distance) % size for distance in range(1, size)]
    keys = [_address(other) for other in others]
    if not keys or not store.check(keys):
        return ""
    by_host: dict[str, tuple[int, str, str]] = {}
    for other, address in zip(others, store.multi_get(keys), strict=True):
        host, port, node = address.decode().split(" ", 2)
        by_host.setdefault(host, (other, port, node))
    failed = []
    for host, (other, port, node) in list(by_host.items())[:_MOST_PROBED]:
        if host in reached or time.monotonic() > deadline:
            continue
        try:
            socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
            reached.add(host)
        except OSError as error:
            reason = error.strerror or "no answer"
            failed.append(f"rank {other} on {node} at {host}:{port} ({reason})")
    return ", ".join(failed)


def allow_ranks(ranks: int, role: str, fewest: int = FEWEST_CONNECTIONS) -> str:
    """Raises this process's limit on open files, so that it can be connected to all ranks.

    Beyond the limit, the store resets connections without a message, and ranks wait for it.

    Args:
        role: of this process, for the message.
        fewest: connections between each rank and this process that the run needs.

    Returns:
        A message if the system does not allow as many; else "".
    """
    most = ranks * CONNECTIONS + OTHER_FILES
    limits = open_files(most)
    return "" if limits is None else _too_few(ranks, fewest, limits, role)


def _too_few(ranks: int, fewest: int, limits: tuple[float, float], role: str) -> str:
    """Says that a limit on open files is too low; "" if it is not."""
    needed, most = (ranks * each + OTHER_FILES for each in (fewest, CONNECTIONS))
    limit, hard = limits
    if limit >= needed:
        return ""
    return (
        f"{ranks} ranks need {needed} to {most} open files on {platform.node()}, which {role}, and "
        f"its limit is {limit} (hard: {hard}). Raise it (ulimit -n and -Hn; LimitNOFILE of "
        "systemd)."
    )


def allow_world(rank: int, ranks: int) -> str:
    """Raises the limit on open files as far as this rank needs, before its first socket.

    Rank 0 hosts the store, unless its launcher does.

    Returns:
        A message if the limit of rank 0 is too low for the store; else "".
    """
    problem = allow_ranks(ranks, "hosts the store of the run")
    if rank != 0:
        return ""  # with gloo it connects to all ranks, see `World.connect`
    if not _is_launchers_store():
        return problem
    if "TORCHELASTIC_RUN_ID" in os.environ and (told := _torchruns_problem(ranks)):
        logger.warning("%s", told)
    return ""  # the agents of `trainer.elastic` raise their limit themselves


def allow_peers(rank: int, ranks: int) -> str:
    """Raises the limit for gloo, by which each rank connects to all others; see `allow_ranks`.

    Rank 0 may host the store as well: at 1,024 ranks, 4,096 connections.
    """
    hosts = rank == 0 and not _is_launchers_store()
    return allow_ranks(ranks, "connects to all ranks", 1 + FEWEST_CONNECTIONS * hosts)


def _is_launchers_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _torchruns_problem(ranks: int) -> str:
    """Compares the limit of torchrun, which it keeps as it was started with; "" if it is enough.

    torchrun is the parent process. The one of rank 0 hosts the store, if that is not at another
    address.
    """
    if sys.platform != "linux":
        return ""
    import resource

    try:
        limits = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
    except OSError:  # another user's, or in another namespace
        return ""
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits)
    return _too_few(ranks, FEWEST_CONNECTIONS, (soft, hard), "runs torchrun with the run's store")


def check_loopback() -> None:
    """Raises an OSError if this machine cannot connect to itself, as with `lo` down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname(), _CONNECT_SECONDS).close()


def _address(rank: int) -> str:
    """The store's key of a rank's address: HOST PORT MACHINE."""
    return f"address/{rank}"


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel detect within seconds that the other machine has lost power or network."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # macOS has only some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def own_address(host: str, port: int) -> str:
    """The address of this machine that is valid for machines that can reach `host`.

    Raises:
        ConfigError: `INTERFACE` names an interface that does not exist, or has no address.
        OSError: the address of `host` is unknown.
    """
    if host not in LOOPBACK and (named := _named_interface()):
        return named
    # The route to `host` decides. Connecting a datagram socket sends nothing.
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own, peer = probe.getsockname()[0], probe.getpeername()[0]
    # If `host` is this machine, its name is valid everywhere, but not the address that it resolves
    # to here: Debian's /etc/hosts maps a machine's own name to 127.0.1.1.
    return host if own == peer or own.startswith("127.") else str(own)


def interface_of(address: str) -> str:
    """Where to listen for machines that connect to this one at `address`.

    Returns:
        The address, or the loopback's for localhost, so that other interfaces stay closed; "",
        which is all interfaces, for a name, which may lead to different addresses elsewhere.
    """
    if address in LOOPBACK:
        return "127.0.0.1"
    try:
        return str(IPv4Address(address))
    except ValueError:
        return ""


def loopback_only(host: str) -> dict[str, str]:
    """Environment variables with which collectives of a single machine listen on its loopback."""
    is_unset = host in LOOPBACK and sys.platform == "linux" and INTERFACE not in os.environ
    return {INTERFACE: "lo"} if is_unset else {}


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
                f"{INTERFACE} is {name}, which is not a network interface with an IPv4 address "
                f"({error.strerror}). Name one that `ip -4 address` lists."
            ) from error
    return socket.inet_ntoa(answer[20:24])
