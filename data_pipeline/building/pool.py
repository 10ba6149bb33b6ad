"""Worker processes fed one item at a time through a pipe each.

Not `concurrent.futures`: there, items queue up in memory, on Python before 3.12 a worker that dies
while an item is being sent can hang the whole pool, and workers outlive a parent that is killed. A
pipe per worker has none of these.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from trainer.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def process(
    items: Iterator[Item], start: Callable[[], Callable[[Item], Result]], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Applies a function to every item in worker processes, one for each of the first items.

    Closing the generator ends the workers at once, so what they write must be atomic.

    Args:
        items: consumed only when a worker is free, so at most `workers` of them are in memory.
        start: called once in each worker; returns the function.
        workers: largest number of processes.

    Yields:
        Items with their results, in the order in which they are done.

    Raises:
        DataError: a worker was killed. What the function raises is raised here too.
    """
    started: list[_Worker[Item, Result]] = []
    first: deque[Item] = deque()
    busy: dict[_Worker[Item, Result], Item] = {}
    try:
        # Sending an item waits for the worker to read it, so all of them start, and import, before
        # the first is sent.
        for waiting in itertools.islice(items, workers):
            first.append(waiting)
            started.append(_Worker(start))
        free = list(started)
        while True:
            while free:
                item = first.popleft() if first else next(items, None)
                if item is None:
                    break
                worker = free.pop()
                worker.send(item)
                busy[worker] = item
            if not busy:
                return
            ready = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in ready]:
                result = worker.receive()
                free.append(worker)
                yield busy.pop(worker), result
    finally:
        for worker in started:
            worker.stop()


class _Worker(Generic[Item, Result]):
    """One process and the pipe to it."""

    def __init__(self, start: Callable[[], Callable[[Item], Result]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, start), daemon=True)
        # Ctrl-C reaches the whole group; the parent decides. A mask holds from a process's birth,
        # imports included.
        resource_tracker.ensure_running()  # starting it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, item: Item) -> None:
        try:
            self.connection.send(item)
        except ConnectionError:
            raise self._killed() from None

    def receive(self) -> Result:
        result: Result
        try:
            result, error = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self._killed() from None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()

    def _killed(self) -> DataError:
        self._process.join()
        return DataError(
            f"a worker process ended without an answer (exit code {self._process.exitcode}; -9 "
            "often means that memory "
            "ran out); what was finished is kept: run the same command again, with fewer workers "
            "if memory is short"
        )


def _serve(connection: Connection, start: Callable[[], Callable[[Item], Result]]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function = None
    with suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            item = connection.recv()
            try:
                function = function or start()
                connection.send((function(item), None))
            except Exception as error:
                if not isinstance(error, DataError):
                    error.add_note(
                        traceback.format_exc()
                    )  # a pickled exception loses its traceback
                connection.send((None, error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
