"""Workers, forked from a server that has imported everything, so a restart costs no import."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NamedTuple, TypeAlias

import torch

from samestep.errors import EXIT_CRASHED

logger = logging.getLogger(__name__)

Main: TypeAlias = Callable[[list[str]], int]
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_CONTEXT = multiprocessing.get_context("fork")
_IGNORED_BY_SERVER = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


class Exit(NamedTuple):
    """A worker that has ended, or could not be started; the code is -N for signal N."""

    local_rank: int
    code: int


class Workers(AbstractContextManager["Workers"]):
    """Starts workers and signals them; the end of a `with` block kills all that are left.

    Workers are children of a fork server, which this process forks early, before it has threads:
    threads do not survive a fork. The server kills all workers when this process is gone. (The fork
    server of `multiprocessing` would leave a folder in /tmp behind a parent that is killed.)

    Args:
        main: a worker calls it with `arguments`; the result is the worker's exit code.
        signals: further signals that workers handle and that others may send to all processes.
    """

    def __init__(
        self, main: Main, arguments: Sequence[str], signals: Sequence[signal.Signals] = ()
    ) -> None:
        self._pipe, server_end = _CONTEXT.Pipe()
        ignored = {*_IGNORED_BY_SERVER, *signals}
        self._server = _CONTEXT.Process(
            target=_serve, args=(server_end, self._pipe, main, list(arguments), ignored)
        )
        # Freeze garbage: an object that waits for its thread when it is collected (a TCPStore does)
        # would hang or crash in the server, where that thread does not exist.
        gc.freeze()
        self._server.start()
        gc.unfreeze()
        server_end.close()

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the server then kills its workers and ends
        self._server.join()

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts one worker per environment, each with these variables added to its own."""
        self._pipe.send(environments)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all living workers."""
        self._pipe.send(number)

    def ended(self, seconds: float) -> Exit | None:
        """Returns the next worker that ends within this time, or None.

        Raises:
            EOFError: the fork server was killed.
        """
        if not self._pipe.poll(seconds):
            return None
        return Exit(*self._pipe.recv())


def _serve(
    pipe: Connection,
    agent_end: Connection,
    main: Main,
    arguments: list[str],
    ignored: set[signal.Signals],
) -> None:
    """Forks workers on request, until the agent is gone."""
    agent_end.close()  # else this process would hold it open and never see the agent's death
    # Terminals and batch systems signal all processes: the workers handle it, the server must not.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    import torch._dynamo  # noqa: F401 imported by optimizers and FSDP2 on first use

    import trainer.training.run  # noqa: F401

    workers: dict[int, tuple[int, BaseProcess]] = {}  # local rank and process, by sentinel
    try:
        while True:
            for ready in wait([pipe, *workers]):
                if isinstance(ready, int):
                    local_rank, worker = workers.pop(ready)
                    worker.join()
                    pipe.send((local_rank, worker.exitcode))
                    continue
                request = pipe.recv()
                if isinstance(request, signal.Signals):
                    for _, worker in workers.values():
                        os.kill(worker.pid or 0, request)
                    continue
                # A new worker ignores signals, as this process does, until it has set its own
                # handlers. Blocked signals wait until then instead of being lost.
                signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
                for local_rank, environment in enumerate(request):
                    worker = _CONTEXT.Process(
                        target=_work, args=(pipe, main, arguments, environment, handlers)
                    )
                    if _start(worker, environment["RANK"]):
                        workers[worker.sentinel] = local_rank, worker
                    else:
                        pipe.send((local_rank, EXIT_CRASHED))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the agent is gone
        pass
    except Exception as error:
        # The end of this process tells the agent.
        logger.error("error: the process that starts the workers has failed: %r", error)
    finally:
        # Whatever it is, or the end of this process would wait for the workers.
        for _, worker in workers.values():
            worker.kill()
            worker.join()


def _start(worker: BaseProcess, rank: str) -> bool:
    """Forks a worker; says why if the system does not let it, which it may do later."""
    try:
        worker.start()
    except OSError as error:
        logger.error(
            "error: rank %s cannot be started: %s. Check the limit of processes (ulimit -u, and "
            "pids.max of a container) and the free memory",
            rank,
            error.strerror or error,
        )
        return False
    return True


def _work(
    pipe: Connection,
    main: Main,
    arguments: list[str],
    environment: Mapping[str, str],
    handlers: Mapping[signal.Signals, Handler],
) -> None:
    pipe.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    os.environ.update(environment)
    faulthandler.enable(2)  # a crash in compiled code prints the Python stacks to stderr
    # torch reads OMP_NUM_THREADS when it is imported, which was in the server.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.exit(main(arguments))
