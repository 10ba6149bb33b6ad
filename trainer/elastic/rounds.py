"""The host of the rendezvous: it starts rounds, and tells their agents who joins and who is lost.

The host is a thread of one agent. All agents, its own included, are connected to it and exchange
JSON objects with it.
"""

from __future__ import annotations

import logging
import math
import platform
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, TypeAlias, TypedDict

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samestep.storage.channel import Channel, Listener, Message
from samestep.stored_json import Between, checked
from trainer.elastic.host import Renewal
from trainer.strategies.agreement import Machine, disagreement
from trainer.strategies.neighbor import allow_ranks, keep_alive

logger = logging.getLogger(__name__)

Event: TypeAlias = Literal["joined", "lost"]

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 600.0
# Both ends of a connection say so often that they are alive. If one says nothing for longer, it is
# frozen: its kernel still answers, so the connection does not break.
ALIVE_SECONDS = 3.0
SILENT_SECONDS = 15.0
MESSAGE_BYTES = 2**20  # holds the facts of a machine; a mixture has many
_LAST_CALL_SECONDS = 3.0  # before the first round, for agents that are started together
_ENDING_SECONDS = 120.0  # from the first loss in a round until its last agent must have left
_OLDER = {"name": "another machine", "facts": {"samestep": "an older version"}}
_HERE_SECONDS = 1.0  # between two messages about how many agents wait
_MOST_WORKERS = 2**16  # of one agent


class _Machine(TypedDict, total=False):
    name: str
    facts: dict[str, str | None]
    has_run: bool


class _FromAgent(TypedDict, total=False):
    """A message of an agent to the host: ready for a round, the end of the run, or alive."""

    ready: Annotated[int, Between(0, _MOST_WORKERS)]
    machine: _Machine
    code: int
    reason: str
    alive: bool


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


class Host(threading.Thread):
    """The rendezvous itself: starts a round once all agents that are here are ready.

    Args:
        listening: where agents connect.
        key: proves that an agent knows the run's secret.
        agents: the least and the largest number of agents of a round.
        renewal: of the record that says who is the host; None if there is only this agent.

    Attributes:
        error: why this thread has failed.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        agents: tuple[int, int],
        renewal: Renewal | None,
    ) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self.error: Exception | None = None
        self._renewal = renewal
        self._min_agents, self._max_agents = agents
        self._interface = listening.getsockname()[0]
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(listening, key, MESSAGE_BYTES)
        # Every connected agent and its number of workers; None while it is not ready for a round.
        self._agents: dict[Channel, int | None] = {}
        self._heard: dict[Channel, float] = {}  # time of each agent's last message
        self._machines: dict[Channel, Machine] = {}
        self._reference: Machine | None = None  # the machine that others are compared with
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
        """Hosts the rendezvous until another agent does, or this thread fails.

        Agents cannot tell a host that has failed from one that waits, as long as its sockets are
        open and its record is renewed. So neither outlives this thread.
        """
        try:
            self._serve()
            logger.info("another agent hosts the rendezvous now")
        except Exception as error:
            self.error = error
            node = platform.node()
            logger.warning("the rendezvous has failed on %s and starts again: %r", node, error)
        finally:
            self.close()

    def close(self) -> None:
        """Closes all sockets, and gives the record up unless another agent hosts."""
        self._listener.close()
        for agent in self._agents:
            agent.close()
        self._selector.close()
        if self._renewal is not None and not self._renewal.is_over:
            self._renewal.leave()

    def _serve(self) -> None:
        while self._renewal is None or not self._renewal.is_over:
            while (agent := self._listener.accept(0)) is not None:
                try:
                    keep_alive(agent.socket)
                    self._selector.register(agent.socket, selectors.EVENT_READ, agent)
                except OSError:  # it is gone already
                    agent.close()
                    continue
                self._agents[agent], self._heard[agent] = None, time.monotonic()
            now = time.monotonic()  # before the look, as in `Rendezvous._receive`
            for key, _ in self._selector.select(POLL_SECONDS):
                agent = key.data
                try:
                    while message := agent.receive_json(0):
                        self._heard[agent] = now
                        self._handle(agent, message)
                except OSError:
                    self._drop(agent)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    reason = f"the rendezvous does not understand this agent ({error!r}). Start "
                    send(agent, {"refused": reason + "the same version on all machines."})
                    self._drop(agent)
            for agent, heard in list(self._heard.items()):
                is_late = agent in self._round and now > self._round_deadline
                if is_late or now > heard + SILENT_SECONDS:
                    self._drop(agent)
            if not self._round:
                self._start_round()
            self._tell_here()
            if self._renewal is not None:
                enough = len(self._ready()) >= self._min_agents
                self._renewal.keep(bool(self._round) or enough)

    def _handle(self, agent: Channel, message: Message) -> None:
        checked(message, _FromAgent)
        if "code" in message:  # the run has ended
            self._round.clear()
            self._tell(self._agents, message)
            return
        if "alive" in message:
            return
        if self._differs(agent, Machine(**message.get("machine", _OLDER))):
            return
        self._agents[agent] = message.get("ready")
        self._last_change, self._is_news = time.monotonic(), True
        if agent in self._round:
            self._leave(agent)
        elif len(self._round) < self._max_agents:
            self._tell_round("joined")

    def _differs(self, agent: Channel, machine: Machine) -> bool:
        """Turns machines away that would train something else; returns whether this one is.

        Before the first round nobody knows which machine is right, so no machine may begin.
        """
        reference, self._machines[agent] = self._reference, machine
        if reference is None:
            self._reference = machine
            return False
        problem = disagreement(reference, machine)
        if not problem:
            return False
        wrong = list(self._machines)
        if reference.has_run:
            wrong = [agent]
        elif machine.has_run:  # and its host is gone: this one knows better
            self._reference = machine
            wrong = [each for each, other in self._machines.items() if disagreement(machine, other)]
        for each in wrong:
            self._agents[each] = None
        if agent in wrong and reference.has_run:
            logger.warning("refused      %s: %s", machine.name, problem)
        self._tell(wrong, {"differs": problem})
        return agent in wrong

    def _ready(self) -> list[Channel]:
        return [agent for agent, workers in self._agents.items() if workers is not None]

    def _drop(self, agent: Channel) -> None:
        self._selector.unregister(agent.socket)
        agent.close()
        del self._agents[agent], self._heard[agent]
        self._machines.pop(agent, None)
        if self._reference is not None and not self._reference.has_run:
            self._reference = next(iter(self._machines.values()), None)
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
        if now >= self._told_alive + ALIVE_SECONDS:
            self._told_alive = now
            self._tell(self._agents, {"alive": True})

    def _start_round(self) -> None:
        """Starts a round, unless more agents are expected."""
        ready = self._ready()[: self._max_agents]
        waited = time.monotonic() - self._last_change
        if len(ready) < self._min_agents:
            if ready and waited > PATIENCE_SECONDS:
                reason = (
                    f"{len(ready)} of at least {self._min_agents} machines have joined within "
                    f"{PATIENCE_SECONDS:g} s. Start more, or lower MIN of --elastic."
                )
                self._tell(ready, {"refused": reason})
            return
        # After a round, the connected agents are known, so nobody else is expected. Before the
        # first round, others may be on their way.
        known = self._store is not None
        complete = len(ready) == self._max_agents or (known and len(ready) == len(self._agents))
        if not complete and waited < _LAST_CALL_SECONDS:
            return
        if self._renewal is not None and self._renewal.check():
            return  # this host was frozen, and the others have gone on
        ranks = sum(self._agents[agent] or 0 for agent in ready)
        if problem := allow_ranks(ranks, "hosts the rendezvous"):
            self._tell(ready, {"refused": problem})
            return
        self._round, self._round_deadline, self._told = ready, math.inf, set()
        self._store = _open_store(self._interface)
        if self._reference is not None:
            self._reference = replace(self._reference, has_run=True)
        self._rounds += 1
        host = 0 if self._renewal is None else self._renewal.number
        # Ranks are consecutive per agent: agents with 2, 3 and 1 workers get the first ranks 0, 2
        # and 5 of a world size of 6.
        sizes = [self._agents[agent] or 0 for agent in ready]
        first_rank = 0
        for agent, size in zip(ready, sizes, strict=True):
            self._agents[agent] = None
            joined = Round(first_rank, sum(sizes), self._store.port, (host, self._rounds))
            send(agent, {"round": asdict(joined)})
            first_rank += size

    def _tell(self, agents: Iterable[Channel], message: Message) -> None:
        for agent in agents:
            send(agent, message)


def send(agent: Channel, message: Message) -> None:
    """Sends a message. If the peer is gone, the next `receive_json` raises."""
    with suppress(OSError):
        agent.send_json(message)


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
