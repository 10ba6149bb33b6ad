"""How the agents of a run meet: who takes part in a round, which ranks each one has, and when a round is over.

One agent hosts the meeting: the first that can listen at the address that all of them know. Each keeps a connection to
it, over which JSON objects go either way, one a line. So the kernel tells of an agent's death at once. (torch's own
rendezvous polls a store for heartbeats: that takes 10 s, and an agent that comes back hangs unless told otherwise.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.errors import ConfigError, LaunchError, RendezvousError
from trainer.strategies.neighbour import keep_alive

logger = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
"""A JSON object; what it is about shows in its keys."""
News: TypeAlias = Literal["arrived", "lost"]

_POLL_SECONDS = 0.1
_LAST_CALL_SECONDS = 3.0  # before the first round, for agents that are started together
_PATIENCE_SECONDS = 600.0
_GREETING_SECONDS = 10.0
_ENDING_SECONDS = 120.0  # from the end of a round to that of its last worker
_LINE_BYTES = 4096


@dataclass(frozen=True)
class Group:
    """An agent's part in a round.

    Attributes:
        first_rank: of its workers.
        world_size: the workers of all agents.
        port: of the round's key-value store, which lies where the agents meet.
    """

    first_rank: int
    world_size: int
    port: int


class Over(Exception):
    """The run has ended at another agent, with exit code `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Rendezvous:
    """An agent's side of the meeting.

    Args:
        address: HOST:PORT, with HOST the name or address of one agent's machine; port 0 takes a free one.
        least: how many agents a round needs.
        most: how many it may have; others wait until there is room.
        run: what the run is, by which its agents know each other.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, least: int, most: int, run: str) -> None:
        self.host, _, port = address.rpartition(":")
        if not self.host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--rendezvous {address} is no HOST:PORT; name a machine of the run and a free port of it"
            )
        self._port, self._least, self._most = int(port), least, most
        self._run = hashlib.sha256(
            run.encode()
        ).hexdigest()  # a command may hold signed addresses, which are secrets
        self._connection: _Connection | None = None
        self._over: Over | None = None

    def meet(self, workers: int, cancelled: Callable[[], bool]) -> Group | None:
        """Waits for the next round.

        Args:
            workers: how many this agent will start.
            cancelled: asked now and then; when it is true, the result is None.

        Raises:
            Over: the run has ended.
            RendezvousError: nobody hosts the meeting, or too few come.
            LaunchError: somebody else is there.
        """
        self._send(ready=workers)
        since, said, here = time.monotonic(), "", self._least
        while not cancelled():
            if self._over is not None:
                raise self._over
            if self._connection is None:
                if problem := self._connect():
                    if time.monotonic() > since + _PATIENCE_SECONDS:
                        raise RendezvousError(
                            f"nobody can be met at {self.host}:{self._port} ({problem}); --rendezvous must name a "
                            "machine that takes part in the run, by a name that leads to it from all of them"
                        )
                    if said != (said := str(problem)):
                        logger.info(
                            "waiting      for %s:%d, where the machines meet: %s",
                            self.host,
                            self._port,
                            said,
                        )
                    time.sleep(_POLL_SECONDS)
                    continue
                self._send(ready=workers)
            message = self._receive(_POLL_SECONDS)
            if "group" in message:
                return Group(**message["group"])
            if "refused" in message:
                self._connection = None
                raise RendezvousError(message["refused"])
            before, here = here, message.get("here", here)
            if here != before and here < self._least:
                logger.info("waiting      for machines: %d of at least %d here", here, self._least)
        return None

    def news(self) -> News | None:
        """What has happened since the round began: another agent has arrived and waits, or one of it is lost."""
        if self._connection is None or self._over is not None:
            return None
        news: News | None = self._receive(0).get("news")
        return "lost" if self._connection is None else news

    def close(self, code: int, reason: str) -> None:
        """Tells the others that the run is over; returns when they have been told."""
        self._send(code=code, reason=reason)
        deadline = time.monotonic() + 1
        while self._connection is not None and self._over is None and time.monotonic() < deadline:
            self._receive(_POLL_SECONDS)

    def _connect(self) -> OSError | None:
        """Joins the meeting, or opens it when it is to be on this machine and nobody else has.

        Returns:
            What may work a little later.

        Raises:
            LaunchError: somebody else is there.
        """
        try:
            listener = socket.create_server((self.host, self._port))
            if self.host not in ("localhost", "127.0.0.1"):
                listener.close()  # the name is one of this machine, but others may reach it at another address
                listener = socket.create_server(("", self._port))
            self._port = listener.getsockname()[1]
            _Host(listener, self._least, self._most, self._run).start()
        except OSError:
            pass
        try:
            connection = _Connection(socket.create_connection((self.host, self._port), timeout=5))
            run = connection.receive(_GREETING_SECONDS).get("run")
        except ConnectionAbortedError:
            run = None
        except OSError as error:
            return error
        if run != self._run:
            who = "no agent of samestep" if run is None else "the agent of another run"
            raise LaunchError(
                f"what listens at {self.host}:{self._port} is {who}; give each run a port of its own in --rendezvous, "
                "and type the same command on all its machines"
            )
        self._connection = connection
        return None

    def _send(self, **message: object) -> None:
        if self._connection is not None and not self._connection.send(message):
            self._connection = None

    def _receive(self, seconds: float) -> Message:
        """The next message, or {} when none comes within this time."""
        if self._connection is None:
            return {}
        try:
            message = self._connection.receive(seconds)
        except OSError:
            self._connection = None
            return {}
        if "code" in message:
            self._over = Over(**message)
        return message


class _Host(threading.Thread):
    """The meeting: it begins a round when all agents that are there are ready, and tells each what it must know."""

    def __init__(self, listener: socket.socket, least: int, most: int, run: str) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._listener, self._least, self._most, self._run = listener, least, most, run
        self._selector = selectors.DefaultSelector()
        self._ready: dict[_Connection, int | None] = {}  # number of workers; None when it is not
        self._round: list[_Connection] = []
        self._ending = math.inf  # until when those of a round that has lost somebody are waited for
        self._store: TCPStore | None = None
        self._since = time.monotonic()

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_POLL_SECONDS):
                try:
                    if key.data is None:
                        self._welcome(_Connection(self._listener.accept()[0]))
                        continue
                    while message := key.data.receive(0):
                        self._heed(key.data, message)
                except OSError:
                    if key.data is not None:
                        self._drop(key.data)
            if time.monotonic() > self._ending:
                for agent in list(self._round):
                    self._drop(agent)
            if not self._round:
                self._begin()

    def _welcome(self, agent: _Connection) -> None:
        self._selector.register(agent.socket, selectors.EVENT_READ, agent)
        self._ready[agent] = None
        agent.send({"run": self._run})

    def _heed(self, agent: _Connection, message: Message) -> None:
        if "code" in message:
            self._round.clear()
            self._tell(self._ready, message)
            return
        self._ready[agent] = message.get("ready")
        self._since = time.monotonic()
        if agent in self._round:
            self._leave(agent)
        elif len(self._round) < self._most:
            self._tell(self._round, {"news": "arrived"})
        waiting = [agent for agent, workers in self._ready.items() if workers is not None]
        self._tell(waiting, {"here": len(waiting) + len(self._round)})

    def _drop(self, agent: _Connection) -> None:
        self._selector.unregister(agent.socket)
        agent.socket.close()
        del self._ready[agent]
        self._leave(agent)

    def _leave(self, agent: _Connection) -> None:
        """Ends the round, if the agent was in it."""
        if agent in self._round:
            self._round.remove(agent)
            self._ending = min(self._ending, time.monotonic() + _ENDING_SECONDS)
            self._tell(self._round, {"news": "lost"})

    def _begin(self) -> None:
        """Begins a round, unless somebody is still to be waited for."""
        ready = [agent for agent, workers in self._ready.items() if workers is not None][
            : self._most
        ]
        waited = time.monotonic() - self._since
        if len(ready) < self._least:
            if ready and waited > _PATIENCE_SECONDS:
                reason = f"{len(ready)} of at least {self._least} machines have come within {_PATIENCE_SECONDS:g} s"
                self._tell(ready, {"refused": f"{reason}; start more, or lower MIN of --elastic"})
            return
        all_here = len(ready) == self._most or (
            len(ready) == len(self._ready) and self._store is not None
        )
        if not all_here and waited < _LAST_CALL_SECONDS:
            return
        self._round, self._ending = ready, math.inf
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sizes = [self._ready[agent] or 0 for agent in ready]
        for index, agent in enumerate(ready):
            self._ready[agent] = None
            group = Group(sum(sizes[:index]), sum(sizes), self._store.port)
            agent.send({"group": asdict(group)})

    def _tell(self, agents: Iterable[_Connection], message: Message) -> None:
        for agent in agents:
            agent.send(message)


class _Connection:
    """A socket, over which JSON objects go, one a line."""

    def __init__(self, connected: socket.socket) -> None:
        keep_alive(connected)
        self.socket = connected
        self._received = b""

    def send(self, message: Message) -> bool:
        """Sends a message; False when the other side is gone, which reading tells as well."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, seconds: float) -> Message:
        """The next message, or {} when none comes within this time.

        Raises:
            OSError: the other side is gone.
        """
        self.socket.settimeout(seconds)
        while b"\n" not in self._received:
            try:
                received = self.socket.recv(4096)
            except (TimeoutError, BlockingIOError):
                return {}
            if not received:
                raise ConnectionResetError("the connection has ended")
            self._received += received
            if len(self._received) > _LINE_BYTES:
                raise ConnectionAbortedError("that is no agent")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message: Message = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ConnectionAbortedError("that is no agent") from error
        return message
