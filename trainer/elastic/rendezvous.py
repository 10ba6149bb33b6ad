"""The rendezvous of agents: which of them form a round, their ranks, and when a round is over.

A run is a sequence of rounds. In a round the set of agents is fixed, each has started its workers,
and the workers form one process group. A round ends when an agent leaves it; the next one starts
when enough agents have joined.

One agent hosts the rendezvous: the first that can listen at the address that all agents know. Each
agent keeps a TCP connection to the host and exchanges JSON objects, one per line. So the kernel
reports an agent's death at once. (torch's own rendezvous polls a store for heartbeats, which takes
10 s, and an agent that comes back hangs unless told otherwise.)
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.errors import ConfigError, LaunchError, RendezvousError
from trainer.strategies.neighbor import keep_alive

logger = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
"""A JSON object; its keys say what it is about."""
Event: TypeAlias = Literal["joined", "lost"]

_POLL_SECONDS = 0.1
_LAST_CALL_SECONDS = 3.0  # before the first round, for agents that are started together
_PATIENCE_SECONDS = 600.0
_GREETING_SECONDS = 10.0
_ENDING_SECONDS = 120.0  # from the first loss in a round until its last agent must have left
_HERE_SECONDS = 1.0  # between two messages about how many agents wait
_LINE_BYTES = 4096


@dataclass(frozen=True)
class Round:
    """An agent's place in a round.

    Attributes:
        first_rank: rank of the agent's first worker.
        world_size: number of workers of all agents.
        port: of the round's key-value store, on the machine of the rendezvous.
    """

    first_rank: int
    world_size: int
    port: int


class RunEnded(Exception):
    """The run has ended at another agent, with exit code `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Rendezvous:
    """An agent's connection to the rendezvous.

    Args:
        address: HOST:PORT. HOST is the name or address of one agent's machine; port 0 takes a free
            port.
        min_agents: number of agents that a round needs.
        max_agents: number of agents that a round may have; others wait until there is room.
        run: text that identifies the run; agents of other runs are rejected.

    Raises:
        ConfigError: the address is not HOST:PORT.
    """

    def __init__(self, address: str, min_agents: int, max_agents: int, run: str) -> None:
        self.host, _, port = address.rpartition(":")
        if not self.host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--rendezvous {address} is not HOST:PORT. Name a machine of the run and a free "
                "port on it."
            )
        self._port, self.min_agents, self.max_agents = int(port), min_agents, max_agents
        # Hashed, as a command line may hold signed URLs, which are secrets.
        self.run = hashlib.sha256(run.encode()).hexdigest()
        self._connection: _Connection | None = None
        self._ended: RunEnded | None = None

    def join(self, workers: int, cancelled: Callable[[], bool]) -> Round | None:
        """Waits for the next round and joins it.

        Args:
            workers: number of workers that this agent will start.
            cancelled: polled while waiting; once it is true, the result is None.

        Raises:
            RunEnded: another agent has ended the run.
            RendezvousError: nobody hosts the rendezvous, or too few agents join.
            LaunchError: another program or another run listens at the address.
        """
        self._send(ready=workers)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        problem, here = "", self.min_agents
        while not cancelled():
            if self._ended is not None:
                raise self._ended
            if self._connection is None:
                error = self._connect()
                if error is None:
                    self._send(ready=workers)
                    continue
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"the rendezvous at {self.host}:{self._port} cannot be reached ({error}). "
                        "Set --rendezvous to a machine that takes part in the run, by a name that "
                        "all machines can resolve."
                    )
                if str(error) != problem:
                    problem = str(error)
                    logger.info(
                        "waiting      for the rendezvous at %s:%d: %s",
                        self.host,
                        self._port,
                        problem,
                    )
                time.sleep(_POLL_SECONDS)
                continue
            message = self._receive(_POLL_SECONDS)
            if "round" in message:
                return Round(**message["round"])
            if "refused" in message:
                self._connection = None
                raise RendezvousError(message["refused"])
            before, here = here, message.get("here", here)
            if here != before and here < self.min_agents:
                logger.info(
                    "waiting      for machines: %d of at least %d here", here, self.min_agents
                )
        return None

    def event(self) -> Event | None:
        """An event of the current round: another agent has joined and waits, or one was lost."""
        if self._connection is None or self._ended is not None:
            return None
        event: Event | None = self._receive(0).get("event")
        return "lost" if self._connection is None else event

    def close(self, code: int, reason: str) -> None:
        """Ends the run for all agents; returns when they have been told."""
        self._send(code=code, reason=reason)
        # The host sends the message back to all agents, this one included.
        deadline = time.monotonic() + 1
        while self._connection is not None and self._ended is None and time.monotonic() < deadline:
            self._receive(_POLL_SECONDS)

    def _connect(self) -> OSError | None:
        """Connects to the rendezvous, and hosts it if it is on this machine and nobody else does.

        Returns:
            An error that may pass.

        Raises:
            LaunchError: another program or another run listens at the address.
        """
        with suppress(OSError):  # another machine's address, or another agent hosts already
            listener = socket.create_server((self.host, self._port))
            if self.host not in ("localhost", "127.0.0.1"):
                # The name leads to this machine, but others may reach it at another address.
                listener.close()
                listener = socket.create_server(("", self._port))
            self._port = listener.getsockname()[1]
            _Host(self, listener).start()
        try:
            connection = _Connection(socket.create_connection((self.host, self._port), timeout=5))
            run = connection.receive(_GREETING_SECONDS).get("run")
        except ConnectionAbortedError:
            run = None
        except OSError as error:
            return error
        if run != self.run:
            who = "another program" if run is None else "the agent of another run"
            raise LaunchError(
                f"{who} listens at {self.host}:{self._port}. Give each run its own port in "
                "--rendezvous, and type the same command on all its machines."
            )
        self._connection = connection
        return None

    def _send(self, **message: object) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _receive(self, seconds: float) -> Message:
        """Returns the next message within this time, or {}."""
        if self._connection is None:
            return {}
        try:
            message = self._connection.receive(seconds)
        except OSError:
            self._connection = None
            return {}
        if "code" in message:
            self._ended = RunEnded(**message)
        return message


class _Host(threading.Thread):
    """The rendezvous itself: starts a round once all agents that are here are ready."""

    def __init__(self, settings: Rendezvous, listener: socket.socket) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._settings, self._listener = settings, listener
        self._selector = selectors.DefaultSelector()
        # Every connected agent and its number of workers; None while it is not ready for a round.
        self._agents: dict[_Connection, int | None] = {}
        self._round: list[_Connection] = []
        self._round_deadline = math.inf  # by when all agents of a broken round must have left it
        # What the round has been told. A second message would change nothing, and with one for each
        # of N agents that join or leave, N agents would get N * N messages.
        self._told: set[Event] = set()
        # Whether an agent has come since those that wait were told how many are here, and the time.
        self._is_news, self._told_here = False, -math.inf
        self._store: TCPStore | None = None
        self._last_change = time.monotonic()

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_POLL_SECONDS):
                agent: _Connection | None = key.data
                try:
                    if agent is None:
                        self._accept()
                        continue
                    while message := agent.receive(0):
                        self._handle(agent, message)
                except OSError:
                    if agent is not None:
                        self._drop(agent)
            if time.monotonic() > self._round_deadline:
                for agent in list(self._round):
                    self._drop(agent)
            if not self._round:
                self._start_round()
            self._tell_here()

    def _accept(self) -> None:
        agent = _Connection(self._listener.accept()[0])
        self._selector.register(agent.socket, selectors.EVENT_READ, agent)
        self._agents[agent] = None
        agent.send({"run": self._settings.run})

    def _handle(self, agent: _Connection, message: Message) -> None:
        if "code" in message:  # the run has ended
            self._round.clear()
            self._tell(self._agents, message)
            return
        self._agents[agent] = message.get("ready")
        self._last_change, self._is_news = time.monotonic(), True
        if agent in self._round:
            self._leave(agent)
        elif len(self._round) < self._settings.max_agents:
            self._tell_round("joined")

    def _ready(self) -> list[_Connection]:
        return [agent for agent, workers in self._agents.items() if workers is not None]

    def _drop(self, agent: _Connection) -> None:
        self._selector.unregister(agent.socket)
        agent.socket.close()
        del self._agents[agent]
        self._leave(agent)

    def _leave(self, agent: _Connection) -> None:
        """Breaks the round if the agent was in it: the others stop their workers and leave, too."""
        if agent in self._round:
            self._round.remove(agent)
            self._round_deadline = min(self._round_deadline, time.monotonic() + _ENDING_SECONDS)
            self._tell_round("lost")

    def _tell_round(self, event: Event) -> None:
        if event not in self._told:
            self._told.add(event)
            self._tell(self._round, {"event": event})

    def _tell_here(self) -> None:
        """Tells the agents that wait how many are here, at most once a second."""
        if self._is_news and time.monotonic() >= self._told_here + _HERE_SECONDS:
            self._is_news, self._told_here = False, time.monotonic()
            ready = self._ready()
            self._tell(ready, {"here": len(ready) + len(self._round)})

    def _start_round(self) -> None:
        """Starts a round, unless more agents are expected."""
        settings = self._settings
        ready = self._ready()[: settings.max_agents]
        waited = time.monotonic() - self._last_change
        if len(ready) < settings.min_agents:
            if ready and waited > _PATIENCE_SECONDS:
                reason = (
                    f"{len(ready)} of at least {settings.min_agents} machines have joined within "
                    f"{_PATIENCE_SECONDS:g} s. Start more, or lower MIN of --elastic."
                )
                self._tell(ready, {"refused": reason})
            return
        # After a round, the connected agents are known, so nobody else is expected. Before the
        # first round, others may be on their way.
        known = self._store is not None
        complete = len(ready) == settings.max_agents or (known and len(ready) == len(self._agents))
        if not complete and waited < _LAST_CALL_SECONDS:
            return
        self._round, self._round_deadline, self._told = ready, math.inf, set()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Ranks are consecutive per agent: agents with 2, 3 and 1 workers get the first ranks 0, 2
        # and 5 of a world size of 6.
        sizes = [self._agents[agent] or 0 for agent in ready]
        first_rank = 0
        for agent, size in zip(ready, sizes, strict=True):
            self._agents[agent] = None
            agent.send({"round": asdict(Round(first_rank, sum(sizes), self._store.port))})
            first_rank += size

    def _tell(self, agents: Iterable[_Connection], message: Message) -> None:
        for agent in agents:
            agent.send(message)


class _Connection:
    """A socket that carries JSON objects, one per line."""

    def __init__(self, connected: socket.socket) -> None:
        keep_alive(connected)
        self.socket = connected
        self._received = b""

    def send(self, message: Message) -> None:
        """Sends a message. If the peer is gone, the next `receive` raises."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Message:
        """Returns the next message within this time, or {}.

        Raises:
            OSError: the peer is gone; a ConnectionAbortedError if it speaks another protocol.
        """
        self.socket.settimeout(seconds)
        while b"\n" not in self._received:
            try:
                received = self.socket.recv(4096)
            except (TimeoutError, BlockingIOError):
                return {}
            if not received:
                raise ConnectionResetError("the peer has closed the connection")
            self._received += received
            if len(self._received) > _LINE_BYTES:
                raise ConnectionAbortedError("the peer is no agent")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message: Message = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ConnectionAbortedError("the peer is no agent") from error
        return message
