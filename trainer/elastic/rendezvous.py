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
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TypedDict

from samestep.errors import CheckpointError, ConfigError, LaunchError, RendezvousError
from samestep.storage.channel import (
    SECRET_BYTES,
    Channel,
    WrongSecretError,
    connect,
    derive,
)
from samestep.stored_json import JsonError, checked
from trainer.checkpoint.files import Location
from trainer.elastic import rounds, secret
from trainer.elastic.host import Records, Renewal
from trainer.elastic.rounds import Event, Host, Round
from trainer.strategies.agreement import Facts, Machine
from trainer.strategies.neighbor import interface_of, keep_alive, own_address

logger = logging.getLogger(__name__)

_GREETING_SECONDS = 10.0
_OWN_SECONDS = 30.0  # for an agent that is alone to reach its own host
_MOST_FAILURES = 3  # of this machine as the host, within PATIENCE_SECONDS


class _FromHost(TypedDict, total=False):
    """A message of the host to an agent, see `trainer.elastic.rounds`."""

    round: Round
    differs: str
    refused: str
    here: int
    event: Event
    code: int
    reason: str
    alive: bool


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
        facts: about this machine; agents with other ones are refused.

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
        facts: Facts | None = None,
    ) -> None:
        self.host, _, port = address.rpartition(":")
        if not self.host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"--rendezvous {address} is not HOST:PORT. Name a machine of the run and a free "
                "port on it."
            )
        self._port, self.min_agents, self.max_agents = int(port), min_agents, max_agents
        self._run, self._folder = run, secrets_folder
        self._machine = Machine(f"{platform.node()} (pid {os.getpid()})", dict(facts or {}))
        self._first = self.host, self._port
        self._records = None if secrets_folder is None else Records(secrets_folder)
        self._renewal: Renewal | None = None  # while this agent is the host
        self._hosting: Host | None = None  # its thread
        self._failures: list[float] = []  # times when it was the host and failed
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
            LaunchError: another program or another run listens at the address, or this machine
                would train something else than the others.
        """
        ready = {"ready": workers, "machine": asdict(self._machine)}
        self._send(**ready)
        began = time.monotonic()
        problem, here = "", self.min_agents
        while not cancelled():
            if self._ended is not None:
                raise self._ended
            if self._connection is None:
                if self._hosting is not None and self._hosting.error is not None:
                    self._count_failure(self._hosting.error)
                try:
                    error = self._connect()
                except (OSError, RuntimeError) as failed:  # no more files or threads
                    self._disconnect()
                    error = failed
                if error is None:
                    self._send(**ready)
                    continue
                # The wait for room in a round, which has no end, does not count.
                lost, alone = max(began, self._heard), self._records is None
                patience = _OWN_SECONDS if alone else rounds.PATIENCE_SECONDS
                if time.monotonic() > lost + patience:
                    fix = (
                        "Check that this machine's loopback interface is up (ip address)."
                        if alone
                        else "Set --rendezvous to a machine that takes part in the run, by a name "
                        "that all machines can resolve."
                    )
                    raise RendezvousError(
                        f"the rendezvous at {self.host}:{self._port} cannot be reached ({error}). "
                        f"{fix}"
                    )
                if str(error) != problem:
                    problem = str(error)
                    logger.info(
                        "waiting      for the rendezvous at %s:%d: %s",
                        self.host,
                        self._port,
                        problem,
                    )
                time.sleep(rounds.POLL_SECONDS)
                continue
            message = self._receive(rounds.POLL_SECONDS)
            if "round" in message:
                self._machine = replace(self._machine, has_run=True)
                return message["round"]
            if "differs" in message:
                self._disconnect()  # the others continue
                raise LaunchError(message["differs"])
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
        event = self._receive(0).get("event")
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
            self._receive(rounds.POLL_SECONDS)

    def leave(self) -> None:
        """Lets another agent be the host, if this one is."""
        if self._renewal is not None:
            self._renewal.leave()

    def _connect(self) -> Exception | None:
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
        elif current is not None and self._records is not None and not self._records.is_silent:
            return ConnectionRefusedError("another agent becomes the host")
        # On this machine, nobody listens there any more, so the host has ended.
        listening = _listen(self.host, self._port)
        if listening is None and self._records is not None and self._records.is_silent:
            logger.info("the host at %s:%d gives no sign of life", self.host, self._port)
            listening = self._listen_here()
        with ExitStack() as unless_hosting:
            if listening is not None:
                unless_hosting.callback(listening.close)
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
                unless_hosting.pop_all()
        fix = "Give each run its own port in --rendezvous, and type the same command on all its "
        try:
            self._connection = connect(
                self.host,
                self._port,
                self.derived_secret("rendezvous"),
                rounds.MESSAGE_BYTES,
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
        """Hosts the rendezvous on a socket, unless another agent becomes the host first.

        Raises:
            RendezvousError: this agent has failed as the host too often.
        """
        self._port = listening.getsockname()[1]
        if self._records is not None:
            try:
                record = self._records.create(former + 1, self.host, self._port)
            except CheckpointError as error:
                return ConnectionError(str(error))
            if record is None:
                return ConnectionRefusedError("another agent becomes the host")
            if record.number > 1:
                logger.info("hosting      the rendezvous at %s:%d", self.host, self._port)
            self._renewal = Renewal(self._records, record)
        hosting: Host | None = None
        try:
            hosting = Host(
                listening,
                self.derived_secret("rendezvous"),
                (self.min_agents, self.max_agents),
                self._renewal,
            )
            if self._renewal is not None:
                self._renewal.start()
            hosting.start()
        except (OSError, RuntimeError) as error:
            if hosting is None:
                self.leave()
            else:
                hosting.close()
            self._count_failure(error)
            return ConnectionError(repr(error))
        self._hosting = hosting
        return None

    def _count_failure(self, error: Exception) -> None:
        """Raises a RendezvousError if this agent has failed as the host too often."""
        self._hosting, now = None, time.monotonic()
        self._failures = [when for when in self._failures if now < when + rounds.PATIENCE_SECONDS]
        self._failures.append(now)
        if len(self._failures) > _MOST_FAILURES:
            raise RendezvousError(
                f"the rendezvous has failed {len(self._failures)} times on this machine, at last "
                f"with {error!r}. Check its memory and its limits (ulimit -a)."
            )

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
            rounds.send(self._connection, message)

    def _receive(self, seconds: float) -> _FromHost:
        """Returns the next message within this time, or {}; tells the host that this one lives.

        Raises:
            RendezvousError: the message is none that this version knows.
        """
        if self._connection is None:
            return {}
        # Time before the look: a pause of this process after it must not count as silence.
        now = time.monotonic()
        if now > self._told + rounds.ALIVE_SECONDS:
            self._told = now
            self._send(alive=True)
        try:
            message = checked(self._connection.receive_json(seconds) or {}, _FromHost)
        except OSError:
            self._disconnect()
            return {}
        except JsonError as error:
            raise RendezvousError(
                f"this agent does not understand the rendezvous ({error}). Start the same version "
                "on all machines."
            ) from error
        if message:
            self._heard = now
        elif now > self._heard + rounds.SILENT_SECONDS:
            logger.info("the host at %s:%d says nothing any more", self.host, self._port)
            self._disconnect()
        if "code" in message:
            self._ended = RunEnded(message["code"], message.get("reason", ""))
        return message


def _listen(host: str, port: int) -> socket.socket | None:
    """Listens at an address; None if it is another machine's, or another agent hosts there."""
    try:
        listening = socket.create_server((host, port))
        interface = interface_of(host)
        if interface != listening.getsockname()[0]:
            # The name leads to this machine, but others may reach it at another address.
            listening.close()
            listening = socket.create_server((interface, port))
    except OSError as error:
        if port == 0:  # any free port, so nobody else listens there
            raise LaunchError(
                f"cannot listen at {host}: {error.strerror}. Check that its network interface is "
                "up (ip address), and the limit of open files (ulimit -n)."
            ) from error
        return None
    return listening
