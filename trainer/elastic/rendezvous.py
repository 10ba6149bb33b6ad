"""The rendezvous of agents: which of them form a round, their ranks, and when a round is over.

A run is a sequence of rounds. In a round the set of agents is fixed, each has started its workers,
and the workers form one process group. A round ends when an agent leaves it; the next one starts
when enough agents have joined.

One agent hosts the rendezvous: first the one that can listen at the address that all agents know,
and when that is lost, another one (`trainer.elastic.host`). Each agent keeps a TCP connection to
the host and exchanges JSON objects over a `Channel`, so only agents that know the run's secret take
part. The kernel reports an agent's death at once. (torch's own rendezvous polls a store for
heartbeats, which takes 10 s, and an agent that comes back hangs unless told otherwise.)
"""

from __future__ import annotations

import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.checkpoint.files import Location
from trainer.elastic import secret
from trainer.elastic.host import Records, Renewal
from trainer.errors import CheckpointError, ConfigError, LaunchError, RendezvousError
from trainer.storage.channel import (
    SECRET_BYTES,
    Channel,
    Listener,
    Message,
    WrongSecretError,
    connect,
    derive,
)
from trainer.strategies.neighbor import interface_of, keep_alive, own_address

logger = logging.getLogger(__name__)

Event: TypeAlias = Literal["joined", "lost"]

_POLL_SECONDS = 0.1
_LAST_CALL_SECONDS = 3.0  # before the first round, for agents that are started together
_PATIENCE_SECONDS = 600.0
_GREETING_SECONDS = 10.0
_ENDING_SECONDS = 120.0  # from the first loss in a round until its last agent must have left
_HERE_SECONDS = 1.0  # between two messages about how many agents wait
# Both ends of a connection say so often that they are alive. If one says nothing for longer, it is
# frozen: its kernel still answers, so the connection does not break.
_ALIVE_SECONDS = 3.0
_SILENT_SECONDS = 15.0
_MESSAGE_BYTES = 2**16


@dataclass(frozen=True)
class Round:
    """An agent's place in a round.

    Attributes:
        first_rank: rank of the agent's first worker.
        world_size: number of workers of all agents.
        port: of the round's key-value store, on the machine of the rendezvous.
        order: number of the host, and of the round of this host.
    """

    first_rank: int
    world_size: int
    port: int
    order: tuple[int, int] = (0, 0)


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
        secrets_folder: where the agents of the run find its secret, see `trainer.elastic.secret`;
            with None there is only this agent, and nobody else learns its secret.

    Raises:
        ConfigError: the address is not HOST:PORT.
    """

    def __init__(
        self,
        address: str,
        min_agents: int,
        max_agents: int,
        run: str,
        secrets_folder: Location | None = None,
    ) -> None:
        self.host, _, port = address.rpartition(":")
        if not self.host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--rendezvous {address} is not HOST:PORT. Name a machine of the run and a free "
                "port on it."
            )
        self._port, self.min_agents, self.max_agents = int(port), min_agents, max_agents
        self._run, self._folder = run, secrets_folder
        self._first = self.host, self._port
        self._records = None if secrets_folder is None else Records(secrets_folder)
        self._renewal: Renewal | None = None  # while this agent is the host
        self._own = ""  # address of this machine for the others, once known
        self._heard = self._told = -math.inf  # times of the last messages from the host and to it
        self._secret = None if secrets_folder else secrets.token_bytes(SECRET_BYTES)
        self._connection: Channel | None = None
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
                found = message["round"]
                return Round(**{**found, "order": tuple(found["order"])})
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

    def derived_secret(self, purpose: str) -> bytes:
        """A secret for one purpose, which all agents of the run derive, once they have joined."""
        assert self._secret is not None, "it is known before a round"
        return derive(self._secret, f"{purpose} of {self._run}".encode())

    def close(self, code: int, reason: str) -> None:
        """Ends the run for all agents; returns when they have been told."""
        self._send(code=code, reason=reason)
        # The host sends the message back to all agents, this one included.
        deadline = time.monotonic() + 1
        while self._connection is not None and self._ended is None and time.monotonic() < deadline:
            self._receive(_POLL_SECONDS)

    def leave(self) -> None:
        """Lets another agent be the host, if this one is."""
        if self._renewal is not None:
            self._renewal.leave()

    def _connect(self) -> OSError | None:
        """Connects to the host, or becomes the host if there is none.

        Returns:
            An error that may pass.

        Raises:
            LaunchError: another program or another run listens at the address.
        """
        try:
            current = None if self._records is None else self._records.newest()
        except CheckpointError as error:  # a store that does not answer may do so later
            return ConnectionError(str(error))
        self.host, self._port = self._first
        if current is not None and current.host:
            self.host, self._port = current.host, current.port
        # On this machine, nobody listens there any more, so the host has ended.
        listening = _listen(self.host, self._port)
        if listening is None and self._records is not None and self._records.is_silent:
            logger.info("the host at %s:%d gives no sign of life", self.host, self._port)
            listening = self._listen_here()
        if self._secret is None and self._folder is not None:
            self._secret = secret.read(self._folder, create=listening is not None)
        if self._secret is None:
            return FileNotFoundError(
                f"the run's secret is not in {self._folder}, which all machines must share"
            )
        if listening is not None:
            problem = self._become_host(listening, 0 if current is None else current.number)
            if problem is not None:
                return problem
        fix = "Give each run its own port in --rendezvous, and type the same command on all its "
        try:
            self._connection = connect(
                self.host,
                self._port,
                self.derived_secret("rendezvous"),
                _MESSAGE_BYTES,
                _GREETING_SECONDS,
            )
        except (WrongSecretError, ConnectionAbortedError) as error:
            is_first = (self.host, self._port) == self._first
            if current is not None and not (is_first and isinstance(error, WrongSecretError)):
                # The host may be frozen, or gone and its port another program's by now.
                return error
            who = "another program"
            if isinstance(error, WrongSecretError):
                who = (
                    f"the agent of another run, or one with another secret than {self._folder} has,"
                )
                fix += "machines, which share that folder."
            else:
                fix += "machines."
            raise LaunchError(f"{who} listens at {self.host}:{self._port}. {fix}") from error
        except OSError as error:
            return error
        keep_alive(self._connection.socket)
        self._heard = time.monotonic()
        own, peer = (
            self._connection.socket.getsockname()[0],
            self._connection.socket.getpeername()[0],
        )
        self._own = self.host if own == peer else own
        return None

    def _become_host(self, listening: socket.socket, former: int) -> OSError | None:
        """Hosts the rendezvous on a socket, unless another agent becomes the host first."""
        self._port = listening.getsockname()[1]
        if self._records is not None:
            try:
                record = self._records.create(former + 1, self.host, self._port)
            except CheckpointError as error:
                listening.close()
                return ConnectionError(str(error))
            if record is None:
                listening.close()
                return ConnectionRefusedError("another agent becomes the host")
            if record.number > 1:
                logger.info("hosting      the rendezvous at %s:%d", self.host, self._port)
            self._renewal = Renewal(self._records, record)
            self._renewal.start()
        _Host(self, listening, self.derived_secret("rendezvous"), self._renewal).start()
        return None

    def _listen_here(self) -> socket.socket | None:
        """Listens at this machine's own address, for the other agents; None if it is unknown."""
        port = self._first[1]
        try:
            self.host = own_address(self.host, self._port)
        except OSError:  # the name of a machine that is gone may be gone, too
            if not self._own:
                return None
            self.host = self._own
        # The same port as before if it is free, as a firewall may let only that through.
        return _listen(self.host, port) or _listen(self.host, 0)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, **message: object) -> None:
        if self._connection is not None:
            _send(self._connection, message)

    def _receive(self, seconds: float) -> Message:
        """Returns the next message within this time, or {}; tells the host that this one lives."""
        if self._connection is None:
            return {}
        # Time before the look: a pause of this process after it must not count as silence.
        now = time.monotonic()
        if now > self._told + _ALIVE_SECONDS:
            self._told = now
            self._send(alive=True)
        try:
            message = self._connection.receive_json(seconds) or {}
        except OSError:
            self._disconnect()
            return {}
        if message:
            self._heard = now
        elif now > self._heard + _SILENT_SECONDS:
            logger.info("the host at %s:%d says nothing any more", self.host, self._port)
            self._disconnect()
        if "code" in message:
            self._ended = RunEnded(**message)
        return message


class _Host(threading.Thread):
    """The rendezvous itself: starts a round once all agents that are here are ready."""

    def __init__(
        self,
        settings: Rendezvous,
        listening: socket.socket,
        key: bytes,
        renewal: Renewal | None,
    ) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._renewal = renewal
        self._settings, self._interface = settings, listening.getsockname()[0]
        self._listener = Listener(listening, key, _MESSAGE_BYTES)
        self._selector = selectors.DefaultSelector()
        # Every connected agent and its number of workers; None while it is not ready for a round.
        self._agents: dict[Channel, int | None] = {}
        self._heard: dict[Channel, float] = {}  # time of each agent's last message
        self._round: list[Channel] = []
        self._round_deadline = math.inf  # by when all agents of a broken round must have left it
        # What the round has been told. A second message would change nothing, and with one for each
        # of N agents that join or leave, N agents would get N * N messages.
        self._told: set[Event] = set()
        # Whether an agent has come since those that wait were told how many are here, and the time.
        self._is_news, self._told_here = False, -math.inf
        self._told_alive = time.monotonic()
        self._rounds = 0
        self._store: TCPStore | None = None
        self._last_change = time.monotonic()

    def run(self) -> None:
        while self._renewal is None or not self._renewal.is_over:
            while (agent := self._listener.accept(0)) is not None:
                keep_alive(agent.socket)
                self._selector.register(agent.socket, selectors.EVENT_READ, agent)
                self._agents[agent], self._heard[agent] = None, time.monotonic()
            now = time.monotonic()  # before the look, as in `Rendezvous._receive`
            for key, _ in self._selector.select(_POLL_SECONDS):
                agent = key.data
                try:
                    while message := agent.receive_json(0):
                        self._heard[agent] = now
                        self._handle(agent, message)
                except OSError:
                    self._drop(agent)
            for agent, heard in list(self._heard.items()):
                is_late = agent in self._round and now > self._round_deadline
                if is_late or now > heard + _SILENT_SECONDS:
                    self._drop(agent)
            if not self._round:
                self._start_round()
            self._tell_here()
            if self._renewal is not None:
                enough = len(self._ready()) >= self._settings.min_agents
                self._renewal.is_of_use = bool(self._round) or enough
        logger.info("another agent hosts the rendezvous now")
        self._listener.close()
        for agent in list(self._agents):
            self._drop(agent)

    def _handle(self, agent: Channel, message: Message) -> None:
        if "code" in message:  # the run has ended
            self._round.clear()
            self._tell(self._agents, message)
            return
        if "alive" in message:
            return
        self._agents[agent] = message.get("ready")
        self._last_change, self._is_news = time.monotonic(), True
        if agent in self._round:
            self._leave(agent)
        elif len(self._round) < self._settings.max_agents:
            self._tell_round("joined")

    def _ready(self) -> list[Channel]:
        return [agent for agent, workers in self._agents.items() if workers is not None]

    def _drop(self, agent: Channel) -> None:
        self._selector.unregister(agent.socket)
        agent.close()
        del self._agents[agent], self._heard[agent]
        self._leave(agent)

    def _leave(self, agent: Channel) -> None:
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
        """Tells the agents that wait how many are here, and all that the host is alive."""
        now = time.monotonic()
        if self._is_news and now >= self._told_here + _HERE_SECONDS:
            self._is_news, self._told_here = False, now
            ready = self._ready()
            self._tell(ready, {"here": len(ready) + len(self._round)})
        if now >= self._told_alive + _ALIVE_SECONDS:
            self._told_alive = now
            self._tell(self._agents, {"alive": True})

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
        if self._renewal is not None and self._renewal.check():
            return  # this host was frozen, and the others have gone on
        self._round, self._round_deadline, self._told = ready, math.inf, set()
        self._store = _open_store(self._interface)
        self._rounds += 1
        host = 0 if self._renewal is None else self._renewal.number
        # Ranks are consecutive per agent: agents with 2, 3 and 1 workers get the first ranks 0, 2
        # and 5 of a world size of 6.
        sizes = [self._agents[agent] or 0 for agent in ready]
        first_rank = 0
        for agent, size in zip(ready, sizes, strict=True):
            self._agents[agent] = None
            joined = Round(first_rank, sum(sizes), self._store.port, (host, self._rounds))
            _send(agent, {"round": asdict(joined)})
            first_rank += size

    def _tell(self, agents: Iterable[Channel], message: Message) -> None:
        for agent in agents:
            _send(agent, message)


def _send(agent: Channel, message: Message) -> None:
    """Sends a message. If the peer is gone, the next `receive_json` raises."""
    with suppress(OSError):
        agent.send_json(message)


def _listen(host: str, port: int) -> socket.socket | None:
    """Listens at an address; None if it is another machine's, or another agent hosts there."""
    try:
        listening = socket.create_server((host, port))
        interface = interface_of(host)
        if interface != listening.getsockname()[0]:
            # The name leads to this machine, but others may reach it at another address.
            listening.close()
            listening = socket.create_server((interface, port))
    except OSError:
        return None
    return listening


def _open_store(interface: str) -> TCPStore:
    """Opens a key-value store that listens on one interface; torch's own choice is all of them."""
    listening = socket.create_server((interface, 0), backlog=1024)
    port = listening.getsockname()[1]
    return TCPStore(
        interface or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # which the store closes
    )
