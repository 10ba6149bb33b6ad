"""The worker processes of an agent, forked from a process that has imported everything: a restart costs no import."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import TypeAlias

import torch

Main: TypeAlias = Callable[[list[str]], int]
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

_CONTEXT = multiprocessing.get_context("fork")
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Workers:
    """Starts workers, signals them and tells of their ends. In a `with` block, after which there are none.

    They are children of a process that this one forks early, before it has any threads, which do not survive a fork.
    That process ends all workers when this one is gone. (The fork server of `multiprocessing` would leave a folder in
    /tmp behind a parent that is killed.)

    Args:
        main: what a worker calls with `arguments`; its result is the worker's exit code.
        arguments: of each worker.
        signals: further ones that workers heed; others may send them to all processes.
    """

    def __init__(
        self, main: Main, arguments: Sequence[str], signals: Sequence[signal.Signals] = ()
    ) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        passed_on = {*_PASSED_ON, *signals}
        self._server = _CONTEXT.Process(
            target=_serve, args=(theirs, self._pipe, main, list(arguments), passed_on)
        )
        gc.freeze()  # what waits for its thread when it is collected (a TCPStore does) would hang or crash over there
        self._server.start()
        gc.unfreeze()
        theirs.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()  # upon which the server kills what is left, and ends
        self._server.join()

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts one worker with each of these additions to the environment."""
        self._pipe.send(environments)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the workers that live."""
        self._pipe.send(number)

    def ended(self, seconds: float) -> tuple[int, int] | None:
        """The next worker that has ended and its exit code, -N for signal N; None when none does within this time.

        Raises:
            EOFError: the process that the workers are forked from was killed.
        """
        if not self._pipe.poll(seconds):
            return None
        number, code = self._pipe.recv()
        return number, code


def _serve(
    orders: Connection,
    other_end: Connection,
    main: Main,
    arguments: list[str],
    passed_on: set[signal.Signals],
) -> None:
    """Forks workers as it is told, until the agent is gone."""
    other_end.close()
    # Terminals and batch systems signal all processes: it is for the workers to heed that.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in passed_on}
    import torch._dynamo  # noqa: F401 as optimizers and FSDP2 do when they are made

    import trainer.training.run  # noqa: F401

    workers: dict[int, tuple[int, BaseProcess]] = {}
    try:
        while True:
            for ready in wait([orders, *workers]):
                if isinstance(ready, int):
                    number, worker = workers.pop(ready)
                    worker.join()
                    orders.send((number, worker.exitcode))
                elif isinstance(order := orders.recv(), signal.Signals):
                    for _, worker in workers.values():
                        os.kill(worker.pid or 0, order)
                else:  # a signal to a worker that ignores them still, as this process does, is to wait
                    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
                    for number, environment in enumerate(order):
                        worker = _CONTEXT.Process(
                            target=_work, args=(orders, main, arguments, environment, handlers)
                        )
                        worker.start()
                        workers[worker.sentinel] = number, worker
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    except (EOFError, OSError):
        for _, worker in workers.values():
            worker.kill()
            worker.join()


def _work(
    orders: Connection,
    main: Main,
    arguments: list[str],
    environment: Mapping[str, str],
    handlers: Mapping[signal.Signals, Handler],
) -> None:
    orders.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    os.environ.update(environment)
    faulthandler.enable(2)  # a crash in compiled code leaves the stacks that led to it on stderr
    torch.set_num_threads(
        int(environment["OMP_NUM_THREADS"])
    )  # the variable alone is read when torch is imported
    sys.exit(main(arguments))
