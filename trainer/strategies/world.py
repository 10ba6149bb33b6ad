"""The processes of a run: rendezvous, and how the failure of one rank ends the others."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)
from torch.distributed.distributed_c10d import _set_pg_timeout

from samestep import log
from samestep.environment import launcher_rank, number
from samestep.errors import EXIT_CRASHED, EXIT_REGROUP, ConnectError, LaunchError, SamestepError
from samestep.stored_json import JsonError, parse_json

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.strategies.agreement import Facts
    from trainer.strategies.announcements import Announcements, Announcer, Settings

logger = logging.getLogger(__name__)

# Keys of the store.
PROGRESS = "progress"  # the step that the run continues from, for the agent
FAILURE = "failure"  # "RANK EXIT_CODE" of the first rank that fails, also for the agent
_ENDING = "ending"  # number of ranks at the end of a successful run
_POLL_SECONDS = 0.5
_SILENT_SECONDS, _REPORT_SECONDS = 5.0, 60.0  # of a wait for other ranks, before a log line
_MOST_LISTED = 8
_CONNECT_SECONDS = 30.0  # to connect to all ranks, before this one looks which do not answer
_BROKEN_SECONDS = 5.0  # for the main thread or another rank to say why a collective has failed

_LEFT: list[object] = []  # process groups that were left, kept until the process ends


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        store: the key-value store of all ranks; None for a single process without a launcher.
        timeout: for the rendezvous and for each collective.
    """

    rank: int
    size: int
    store: Store | None
    timeout: timedelta
    _over: threading.Event = field(default_factory=threading.Event)
    _watchers: list[threading.Thread] = field(default_factory=list)
    _announcer: list[Announcer] = field(default_factory=list)  # once a loader needs it
    _devices: list[torch.device] = field(default_factory=list)  # once they are connected
    _connecting: threading.Event = field(default_factory=threading.Event)
    _reached: set[str] = field(default_factory=set)  # hosts that have answered, see `unreachable`

    @classmethod
    def start(cls, timeout_seconds: float) -> World:
        """Joins the rendezvous that the launcher's environment (RANK, WORLD_SIZE, ...) describes.

        Raises:
            LaunchError: not all processes have joined in time, the environment is incomplete, or
                the process of the store may not open enough files.
        """
        timeout = timedelta(seconds=timeout_seconds)
        if launcher_rank() is None:
            return cls(0, 1, None, timeout)
        _check_limit_and_route()
        with _explained(), _reported_wait():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store.set(_here(rank), "")
            # torchrun may keep one store for all attempts, with the failure of an earlier one.
            if attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT"):
                store = PrefixStore(f"{attempt}/{size}", store)
            store.set_timeout(timeout)
        world = cls(rank, size, store, timeout)
        watcher = threading.Thread(
            target=world._watch, args=(store.clone(),), name="failure-watch", daemon=True
        )
        watcher.start()
        world._watchers.append(watcher)
        return world

    def agree(self, facts: Facts) -> None:
        """Compares the facts of all ranks before any collective. One operation of the store.

        Raises:
            LaunchError: another rank has other facts.
        """
        if self.store is None:
            return
        from trainer.strategies.agreement import Machine, disagreement

        own = Machine(f"rank {self.rank} ({platform.node()})", facts)
        stored = self.store.compare_set("facts", "", json.dumps([own.name, dict(facts)]))
        try:
            first = Machine(*parse_json(stored, tuple[str, dict[str, str | None]]))
        except JsonError as error:
            raise LaunchError(
                f"the store of this run holds other facts than ranks write: {error}. Another "
                "program writes to it; start the run again, at another port."
            ) from error
        if problem := disagreement(first, own):
            raise LaunchError(problem)

    def connect(self, backend: str, device: torch.device | None = None) -> None:
        """Initializes collectives.

        Separate from `start`, so that a failure in between reaches the other ranks, too.

        Args:
            backend: of torch.distributed.
            device: of the accelerator, to connect at once; None connects in the first collective.

        Raises:
            LaunchError: the processes would use different back-ends, or gloo, which connects each
                rank to all others, more files than they may open.
            ConnectError: they cannot connect to each other.
        """
        with _explained():
            store = self.store or HashStore()
            first = store.compare_set("backend", "", backend).decode()
            if first != backend:
                raise LaunchError(
                    f"rank {self.rank} on {platform.node()} would use {backend} and another rank "
                    f"{first}, because they found different hardware. Check this node's devices "
                    "and driver, or set accelerator=cpu."
                )
            if backend == "gloo" and self.size > 1:
                from trainer.strategies.neighbor import allow_peers

                if problem := allow_peers(self.rank, self.size):
                    raise LaunchError(problem)
            store.set(_ready(self.rank), "")
            self._connecting.set()
            try:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=self.timeout,
                    device_id=device,
                )
            except RuntimeError as error:
                problem = self._unreachable(store)
                raise ConnectError(problem or self._misled(error)) from error
            finally:
                self._connecting.clear()
        if device is not None:
            self._devices.append(device)

    def announcements(self, data: Settings) -> Announcements | None:
        """Opens the ranks' announcements about blocks of the next loader; None if it needs none."""
        if data.on_corrupt == "skip" and self.store is not None and self.size > 1:
            from trainer.strategies.announcements import Announcer

            if not self._announcer:
                self._announcer.append(Announcer(self.store, self.size))
            return self._announcer[0].open(data.blocks_ahead)
        return None

    def new_group(
        self, ranks: Sequence[int] | None = None, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Creates a group with the time-out of the run. All ranks call it.

        By itself, torch gives each group its own default: 10 or 30 minutes.

        Args:
            ranks: None: all.
            backend: of torch.distributed; None: as `connect`.
        """
        members = None if ranks is None else list(ranks)
        group: dist.ProcessGroup = dist.new_group(members, self.timeout, backend)
        return group

    def host_group(self) -> dist.ProcessGroup:
        """Creates a group of all ranks for tensors on the host. All ranks call it."""
        return self.new_group(backend="gloo")

    def mesh(self, device: torch.device, **dimensions: int) -> DeviceMesh:
        """Arranges all ranks in a mesh, and gives its groups the time-out of the run.

        Args:
            dimensions: names and sizes, the outermost first.
        """
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(
            device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
        )
        for group in mesh.get_all_groups():
            if group != dist.group.WORLD:
                _set_pg_timeout(self.timeout, group)
        return mesh

    def close(self) -> None:
        """Leaves the process group after a successful run."""
        if self.store is not None:
            self.store.add(_ENDING, 1)
        # Rank 0 may host the store, and its end must not look like a failure to the others.
        dist.barrier()
        self._stop_watching()
        # A DDP module holds the group too. If it were the last owner, the group would be destroyed
        # with the module, under the interpreter's lock. The group's threads may wait for that lock
        # to release tensors: a deadlock.
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> None:
        """Reports to the other ranks that this one fails, unless another rank has failed first.

        Returns if the caller should report `error`. If another rank has failed first, `error` is
        most likely the broken collective that followed, and the process ends here without a
        message.
        """
        explained = isinstance(error, SamestepError)
        if explained:
            self._over.set()
        if self.store is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        try:
            if not explained:
                # The connections of a failed rank may break before its reason is in the store.
                time.sleep(2 * _POLL_SECONDS)
            code = error.exit_code if isinstance(error, SamestepError) else EXIT_REGROUP
            mine = f"{self.rank} {code}"
            first = self.store.compare_set(FAILURE, "", mine).decode()
            if first != mine:
                rank, exit_code = first.split()
                _leave(rank, int(exit_code))
        except RuntimeError:
            # The store is gone, so a broken collective is the consequence, not the cause.
            if not explained:
                _leave("", EXIT_REGROUP)
        self._stop_watching()

    def _stop_watching(self) -> None:
        """Ends the thread of `_watch`, which takes at most about two polls.

        If the interpreter ended while the thread is inside the store's C++ code, the process would
        abort.
        """
        self._over.set()
        for watcher in self._watchers:
            watcher.join(timeout=10 * _POLL_SECONDS)

    def tell_progress(self, step: int) -> None:
        """Publishes the step that the run continues from, for the agent that started this run."""
        if self.store is not None and self.rank == 0:
            self.store.set(PROGRESS, str(step))

    def _watch(self, store: Store) -> None:
        """Ends this process when another rank fails, or the parent process or the store is gone.

        Otherwise, a collective would only end by its time-out, and a process without its agent
        would continue to train unnoticed.
        """
        try:
            try:
                self._watch_ranks(store)
            except RuntimeError:
                raise
            except Exception as error:  # no more files, or a wrong interface
                reason = f"{self._name} cannot watch the other ranks: {error}"
                self._end(store, reason, getattr(error, "exit_code", EXIT_CRASHED))
            failure = store.get(FAILURE).decode() if store.check([FAILURE]) else ""
        except RuntimeError:
            if self._over.wait(_POLL_SECONDS):
                return
            _leave("", EXIT_REGROUP)
        if self._over.is_set() or not failure:
            return
        rank, code = failure.split()
        if int(rank) != self.rank:
            if int(code) != EXIT_REGROUP:
                time.sleep(_POLL_SECONDS)  # the rank that failed reports first
            _leave(rank, int(code))

    def _watch_ranks(self, store: Store) -> None:
        """Returns when a rank has failed, or the run is over."""
        parent = os.getppid()
        broken = 0.0  # when a collective was found to have failed
        looked = time.monotonic()  # for ranks that do not answer, or not connecting
        from trainer.strategies.neighbor import Neighbor

        with closing(Neighbor(store, self.rank, self.size)) as neighbor:
            while not store.check([FAILURE]):
                if neighbor.dies_within(_POLL_SECONDS) and not self._over.wait(_POLL_SECONDS):
                    # If all ranks were at the end, it has only ended before this one.
                    if store.add(_ENDING, 0) == self.size:
                        return
                    # Does nothing if the rank has reported its failure itself.
                    store.compare_set(FAILURE, "", f"{neighbor.rank} {EXIT_REGROUP}")
                if self._over.is_set():
                    return
                if os.getppid() != parent:
                    _leave("", EXIT_REGROUP)
                if not self._connecting.is_set():
                    looked = time.monotonic()
                elif time.monotonic() > looked + _CONNECT_SECONDS:
                    self._check_connecting(store)
                    looked = time.monotonic()
                if problem := _broken_collective(self._devices):
                    broken = broken or time.monotonic()
                    if time.monotonic() > broken + _BROKEN_SECONDS:
                        self._end(store, self._explain_broken(problem))

    def _check_connecting(self, store: Store) -> None:
        """Says which machines do not answer, if all ranks wait; with gloo, the run ends.

        Other back-ends may connect over another network.
        """
        if not store.check([_ready(rank) for rank in range(self.size)]):
            return  # a rank may be slow
        problem = self._unreachable(store)
        if problem and self._connecting.is_set():
            if store.get("backend") == b"gloo":
                self._end(store, problem)
            logger.warning("%s", problem)

    def _unreachable(self, store: Store) -> str:
        """Says which ranks this one cannot reach; "" if it reaches all, or another one tries."""
        from trainer.strategies.neighbor import INTERFACE, unreachable

        is_first_here = not os.environ.get("LOCAL_RANK", "").strip("0")
        others = unreachable(store, self.rank, self.size, self._reached) if is_first_here else ""
        return others and (
            f"{self._name} cannot reach {others}. Check that the network interface ({INTERFACE}: "
            f"{os.environ.get(INTERFACE, 'not set')}) is up on all machines, and that no firewall "
            "closes ports between them."
        )

    def _misled(self, error: Exception) -> str:
        """Explains why collectives do not connect although all ranks reach each other."""
        from trainer.strategies.neighbor import INTERFACE

        return (
            f"{self._name} could not connect to the other ranks: {_first_line(error)}. Set "
            f"{INTERFACE} ({os.environ.get(INTERFACE, 'not set')} here) to the network interface "
            "that all machines share, and check that all processes were started."
        )

    def _explain_broken(self, problem: str) -> str:
        """Explains a failed collective that neither the main thread nor a rank reports.

        The main thread may wait for something that never comes, or not use the device for long.
        """
        if problem == "TIMEOUT":
            return (
                f"{self._name} has waited in a collective for training.collective_timeout, "
                f"{self.timeout.total_seconds():g} s, for a rank that hangs. Set "
                "training.hang_timeout, which names that rank."
            )
        return (
            f"a collective of {self._name} has failed, and no rank says why. Check the network and "
            "the devices."
        )

    @property
    def _name(self) -> str:
        return f"rank {self.rank} ({platform.node()})"

    def _end(self, store: Store, reason: str, code: int = EXIT_CRASHED) -> None:
        """Ends the run from this thread, unless another rank has failed first."""
        mine = f"{self.rank} {code}"
        if store.compare_set(FAILURE, "", mine).decode() == mine:
            logger.error("error: %s", reason)
            log.exit_now(code)


@contextmanager
def _reported_wait() -> Iterator[None]:
    """Says after some seconds which ranks this one waits for, and again from time to time."""
    is_over = threading.Event()

    def report() -> None:
        seconds = _SILENT_SECONDS
        while not is_over.wait(seconds):
            logger.warning("waiting      for %s at %s", _missing_ranks(), _address())
            seconds = _REPORT_SECONDS

    threading.Thread(target=report, name="rendezvous-wait", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _missing_ranks() -> str:
    """The ranks that have not joined the rendezvous, for a log line."""
    size = number("WORLD_SIZE", 1)
    if number("RANK", 0):
        return "rank 0, which does not answer"
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT", 0)
    try:  # rank 0 hosts the store while it waits, and the ranks that have joined are in there
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
        missing = [rank for rank in range(1, size) if not store.check([_here(rank)])]
    except RuntimeError:
        return "the other ranks"
    listed = ", ".join(map(str, missing[:_MOST_LISTED]))
    more = f" and {len(missing) - _MOST_LISTED} more" if len(missing) > _MOST_LISTED else ""
    return f"{len(missing)} of {size} ranks ({listed}{more})"


def _here(rank: int) -> str:
    # `_missing_ranks` reads the launcher's store, which may have the keys of an earlier attempt.
    return f"here/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}/{rank}"


def _ready(rank: int) -> str:
    """The store's key of a rank that begins to connect to the others."""
    return f"ready/{rank}"


def _check_limit_and_route() -> None:
    """Raises the limit of open files, and a ConnectError if there is no way to rank 0's address."""
    from trainer.strategies.neighbor import LOOPBACK, allow_world, check_loopback, own_address

    if problem := allow_world(number("RANK", 0), number("WORLD_SIZE", 1)):
        raise LaunchError(problem)

    host = os.environ.get("MASTER_ADDR", "")
    try:
        if host in LOOPBACK:
            check_loopback()
        else:
            own_address(host, number("MASTER_PORT", 0))
    except OSError as error:
        # Another machine's name may be unknown for a while, until that machine has started.
        if host in LOOPBACK or error.errno == errno.ENETUNREACH:
            raise ConnectError(
                f"rank {number('RANK', 0)} ({platform.node()}) cannot reach rank 0 at "
                f"{_address()}: {error.strerror or error}. Check that the network interface is up "
                "and has an address (ip address)."
            ) from error


def _first_line(error: Exception) -> str:
    """An error's text without the stack of compiled code."""
    return str(error).partition("\n")[0].rstrip(".")


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _broken_collective(devices: Iterable[torch.device]) -> str:
    """The first error that a back-end has found in its collectives; "" if there is none."""
    for device in devices:
        for group in list(dist.distributed_c10d._world.pg_map):
            with suppress(RuntimeError):  # a group for the host has no back-end for the device
                error = group._get_backend(device).get_error()
                if error != ErrorType.SUCCESS:
                    return str(error.name)
    return ""


def _leave(culprit: str, code: int) -> NoReturn:
    """Ends the process at once. The rank that failed has reported why, unless it was killed."""
    why = f"rank {culprit} is gone" if culprit else "the process that started this is gone"
    logger.log(logging.INFO if code == EXIT_REGROUP else logging.DEBUG, "stopping because %s", why)
    log.exit_now(code)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns errors of torch.distributed into a ConnectError with the fix."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectError(
            f"rank {os.environ.get('RANK', 0)} could not connect to the other ranks at "
            f"{_address()}: {_first_line(error)}. Check that the address is reachable from this "
            "node and that all processes were started."
        ) from error
