"""Worker processes that get one item at a time, each through a pipe of its own.

Not `concurrent.futures`: its items queue up in memory, before Python 3.12 a worker that dies while
an item is sent can hang the whole pool, and its workers survive a parent that is killed. A pipe per
worker has none of these faults.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from samestep.config import own_modules
from samestep.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def process(
    items: Iterator[Item], start: Callable[[], Callable[[Item], Result]], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Applies a function to every item, in worker processes.

    Closing the generator ends the workers at once, so files that they write must be atomic.

    Args:
        items: consumed only when a worker is free, so at most `workers` of them are in memory.
        start: called once in each worker; returns the function.
        workers: maximum number of processes; fewer start if there are fewer items.

    Yields:
        Items with their results, in the order in which they finish.

    Raises:
        DataError: a worker was killed. What the function raises is raised here, too.
    """
    # All workers start, and import, before the first item is sent: sending waits for the worker to
    # read.
    first = list(itertools.islice(items, workers))
    started: list[_Worker[Item, Result]] = []
    busy: dict[_Worker[Item, Result], Item] = {}
    try:
        for _ in first:
            started.append(_Worker())
        for worker in started:
            worker.send(start)
        free = list(started)
        while True:
            while free:
                item = first.pop(0) if first else next(items, None)
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

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # Ctrl-C reaches the whole process group, but only the parent reacts. A signal mask is
        # inherited, so it holds during the imports of the new process, too.
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Only the worker holds its end now, so the pipe breaks when the worker dies.
        theirs.close()

    def send(self, message: Item | Callable[[], Callable[[Item], Result]]) -> None:
        try:
            self.connection.send(message)
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
            "often means that memory ran out, and 1 that a script builds outside of `if __name__ "
            "== '__main__':`, where workers import it). Finished shards are kept: run the same "
            "command again, with fewer workers if memory is short."
        )


def _serve(connection: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # `start` may be of a user's own module. So it is received only now, not as an argument.
    own_modules.make_importable(os.getcwd())
    function = None
    with suppress(EOFError, ConnectionError):  # the parent has ended
        start = connection.recv()
        while True:
            item = connection.recv()
            try:
                function = function or start()
                connection.send((function(item), None))
            except Exception as error:
                # Pickling an exception loses its traceback. The messages of a DataError need none.
                if not isinstance(error, DataError):
                    error.add_note(traceback.format_exc())
                connection.send((None, error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
