"""The processes of a run: who they are, how they meet, and how one's failure reaches the others."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from trainer.errors import EXIT_REGROUP, LaunchError, SamestepError
from trainer.strategies.neighbour import Neighbour

logger = logging.getLogger(__name__)

PROGRESS = "progress"
_FAILURE = "failure"
_ENDING = "ending"  # how many have come to the end of a run that went well
_POLL_SECONDS = 0.5

_LEFT: list[object] = []  # groups that have been left, until the process ends


def host_group() -> dist.ProcessGroup:
    """A new group of all processes for tensors on the host; all processes have to make it."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        store: the key-value store that all of them reach, or None when there is only one.
        timeout: how long ranks wait for each other.
    """

    rank: int
    size: int
    store: Store | None
    timeout: timedelta
    _over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def start(cls, timeout_seconds: float) -> World:
        """Meets the other processes that the launcher's environment (RANK, WORLD_SIZE, ...) speaks
        of.

        Args:
            timeout_seconds: how long to wait for them, here and in each collective.

        Raises:
            LaunchError: they did not meet in time.
        """
        timeout = timedelta(seconds=timeout_seconds)
        if "RANK" not in os.environ:
            return cls(0, 1, None, timeout)
        with _explained():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            if attempt := os.environ.get(
                "TORCHELASTIC_RESTART_COUNT"
            ):  # torchrun may keep a store for all of them
                store = PrefixStore(f"{attempt}/{size}", store)
            store.set_timeout(timeout)
        world = cls(rank, size, store, timeout)
        threading.Thread(
            target=world._watch, args=(store.clone(),), name="failure-watch", daemon=True
        ).start()
        return world

    def connect(self, backend: str) -> None:
        """Makes collectives possible.

        A step of its own, so that failures before it reach the other ranks, too.

        Raises:
            LaunchError: the processes cannot connect to each other.
        """
        with _explained():
            store = self.store or HashStore()
            first = store.compare_set("backend", "", backend).decode()
            if first != backend:
                raise LaunchError(
                    f"rank {self.rank} on {platform.node()} would speak {backend} and another rank "
                    f"{first}, because "
                    "they found different hardware; check this node's devices and driver, or set "
                    "accelerator=cpu"
                )
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
            )

    def close(self) -> None:
        """Leaves the others after a run that ended well."""
        if self.store is not None:
            self.store.add(_ENDING, 1)
        dist.barrier()  # rank 0 may host the store: nobody may take its end for a failure
        self._over.set()
        # A module of DDP holds the group too. Were it the last to, the group would end when the
        # module does, under the interpreter's lock, for which the group's threads may wait to let
        # go of tensors: neither would ever end.
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks that this one stops, unless one of them was first.

        Returns when the caller is to report `error` itself. When another rank failed first, `error`
        is most likely only the broken collective that followed from it: the process then ends here,
        in silence.
        """
        explained = isinstance(error, SamestepError)
        if self.store is None or explained:
            self._over.set()
        if self.store is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        try:
            if not explained:
                time.sleep(
                    2 * _POLL_SECONDS
                )  # a peer that fails drops its connections before its reason is read
            code = error.exit_code if isinstance(error, SamestepError) else EXIT_REGROUP
            mine = f"{self.rank} {code}"
            first = self.store.compare_set(_FAILURE, "", mine).decode()
            if first != mine:
                rank, exit_code = first.split()
                _leave(rank, int(exit_code))
        except (
            RuntimeError
        ):  # the store is gone, and so broken collectives are what follows from that
            if not explained:
                _leave("", EXIT_REGROUP)
        self._over.set()

    def tell_progress(self, step: int) -> None:
        """Tells the process that started this one which step the run goes on from."""
        if self.store is not None and self.rank == 0:
            self.store.set(PROGRESS, str(step))

    def _watch(self, store: Store) -> None:
        """Ends this process when another rank has failed or died, or with what started it, or hosts
        the store.

        Otherwise a collective's time-out would have to, and without its agent this process would
        train on unseen.
        """
        parent = os.getppid()
        try:
            with closing(Neighbour(store, self.rank, self.size)) as neighbour:
                while not store.check([_FAILURE]):
                    if neighbour.dies_within(_POLL_SECONDS) and not self._over.wait(_POLL_SECONDS):
                        if store.add(_ENDING, 0) == self.size:  # it was faster than this one
                            return
                        store.compare_set(
                            _FAILURE, "", f"{neighbour.rank} {EXIT_REGROUP}"
                        )  # unless it has said why
                    if self._over.is_set():
                        return
                    if os.getppid() != parent:
                        _leave("", EXIT_REGROUP)
                failure = store.get(_FAILURE).decode()
        except RuntimeError:
            if self._over.wait(_POLL_SECONDS):
                return
            _leave("", EXIT_REGROUP)
        rank, code = failure.split()
        if int(rank) != self.rank:
            if int(code) != EXIT_REGROUP:
                time.sleep(_POLL_SECONDS)  # the rank that failed has the first word
            _leave(rank, int(code))


def _leave(culprit: str, code: int) -> NoReturn:
    """Ends the process without a farewell to the others.

    The rank that failed has said why, unless it was killed.
    """
    why = f"rank {culprit} is gone" if culprit else "the process that started this is gone"
    logger.log(logging.INFO if code == EXIT_REGROUP else logging.DEBUG, "stopping because %s", why)
    logging.shutdown()
    os._exit(code)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own errors are such
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"rank {os.environ.get('RANK', 0)} could not meet the others at {where}: {error}; "
            "check that "
            "the address is reachable from this node and that all processes were started"
        ) from error
