"""Trainings that all believe the run is theirs, frozen between any two of their operations.

The lock is left out, as if it had expired at once. The store is in memory and executes one
operation of one training at a time, in the order that a test asks for.

Whatever the order, the checkpoints that count are one line of history, and none is missing that a
training has relied on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from samestep.errors import CheckpointError, SupersededError
from samestep.storage import attempts, objects
from trainer.checkpoint import Checkpointer, Config, files, integrity, lease
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.meta import read_meta
from trainer.checkpoint.urls import Url

Line = list[list[Any]]
"""What a training has gone through: the step and the name of the training that took it."""
Choose = Callable[[list[str]], str]
"""Chooses who executes the next operation, of those that have one."""


class Ended(BaseException):
    """The process of a training ends at once."""


class Store:
    """Lets trainings, which are threads, execute one operation after another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._turn: str | None = None
        self._busy = 0
        self.names: dict[int, str] = {}  # of the training that a thread works for

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            self.names[threading.get_ident()] = name
            try:
                work()
            finally:
                self._rest()

        with self._changed:
            self._busy += 1
        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def take_turn(self) -> None:
        """Waits until this training may execute its next operation."""
        name = self.names.get(threading.get_ident())
        if name is None:  # of the test
            return
        with self._changed:
            self._waiting.add(name)
            self._rest()
            while self._turn != name:
                self._changed.wait()
            self._turn = None
            self._waiting.remove(name)

    def _rest(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def run(self, trainings: list[Training], choose: Choose) -> list[str]:
        """Runs trainings at the same time; returns whose operation was when."""
        threads = [self.start(training.name, training.run) for training in trainings]
        order = list(self._execute(choose))
        for thread in threads:
            thread.join()
        return order

    def _execute(self, choose: Choose) -> Iterator[str]:
        """Executes the operations of all trainings until all have ended; yields whose each was."""
        while True:
            with self._changed:
                while self._busy:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._turn = name = choose(sorted(self._waiting))
                self._busy = 1
                self._changed.notify_all()
            yield name


class Serial:
    """A pool of threads without threads: a training executes one operation at a time."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def map(self, function: Callable[..., object], *items: Iterable[object]) -> list[object]:
        return list(map(function, *items))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store, attempt = Store(), attempts.attempt

    def in_turn(*arguments: Any) -> object:
        store.take_turn()
        return attempt(*arguments)

    def end(error: SupersededError) -> None:
        raise Ended

    def remove(system: MemoryFileSystem, path: str) -> None:
        if system.store.pop(system._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", remove)  # its own raises another error
    monkeypatch.setattr(objects, "attempt", in_turn)
    monkeypatch.setattr(lease, "end", end)
    for module in ("files", "integrity", "layout", "restoring"):
        monkeypatch.setattr(f"trainer.checkpoint.{module}.ThreadPoolExecutor", Serial)
    return store


class Training:
    """A training of some steps from the newest checkpoint on; each is saved.

    Attributes:
        relied_on: the lines of the checkpoints whose saves it knows to have succeeded.
    """

    def __init__(self, name: str, root: Url, store: Store, steps: int) -> None:
        self.name, self._root, self._store, self._steps = name, root, store, steps
        self.relied_on: list[Line] = []

    def run(self) -> None:
        try:
            self._train()
        except Ended:
            pass
        except CheckpointError:  # such as a file that another training has removed while it reads
            pass

    def _train(self) -> None:
        held = Lease.take(self._root)
        if held is None:
            return
        saver = _Checkpointer(self._root, self.name, self._store, held)
        newest, line = saver.latest(), []
        saver.continue_from(newest)
        weights = {"w": torch.zeros(2)}
        if newest is not None:
            line = saver.restore(weights, newest)["line"]
        for step in range((newest or 0) + 1, (newest or 0) + 1 + self._steps):
            line = [*line, [step, self.name]]
            saver.save(step, weights, {"line": line})
            if saver.has_ended:
                return
            if saver.saved == step:
                self.relied_on.append(line)


class _Checkpointer(Checkpointer):
    def __init__(self, root: Url, name: str, store: Store, held: Lease | None) -> None:
        config = Config(asynchronous=False)
        super().__init__(root, config, rank=0, world_size=1, lease=held)
        self._name, self._store, self.has_ended = name, store, False

    def _write(self, *arguments: Any) -> None:
        self._store.names[threading.get_ident()] = self._name
        try:
            super()._write(*arguments)
        except Ended:
            self.has_ended = True


def happen(store: Store, root: Url, names: list[str], choose: Choose, steps: int = 3) -> list[str]:
    """Runs trainings at the same time, and then one more; returns whose operation was when.

    Checks what must hold whatever the order.
    """
    trainings = [Training(name, root, store, steps) for name in names]
    order = store.run(trainings, choose)
    check(root, trainings)
    after = Training("after", root, store, steps=1)
    store.run([after], max)
    assert after.relied_on, "a run always goes on"
    check(root, [*trainings, after])
    files.remove_folder(root, first=".none")
    return order


def check(root: Url, trainings: list[Training]) -> None:
    reader = Checkpointer(root, Config(), rank=0, world_size=1)
    lines: list[Line] = []
    newest = reader.latest()
    for step in reader.steps():
        folder = integrity.step_folder(root, step)
        integrity.check_content(folder)
        lines.append(read_meta(folder)["line"])
    lines += [line for training in trainings for line in training.relied_on]
    longest: Line = lines[reader.steps().index(newest)] if newest is not None else []
    for line in lines:
        assert line == longest[: len(line)], f"{line} is not on the line of {longest}"


def paused(name: str, operations: int) -> Choose:
    """One training is frozen before an operation, until all the others have ended."""
    left = operations

    def choose(waiting: list[str]) -> str:
        nonlocal left
        if name in waiting and left > 0:
            left -= 1
            return name
        return next((other for other in waiting if other != name), name)

    return choose


def in_bursts(seed: int) -> Choose:
    """Any training executes one to many operations, then perhaps another."""
    generator, current, left = random.Random(seed), "", 0

    def choose(waiting: list[str]) -> str:
        nonlocal current, left
        if left <= 0 or current not in waiting:
            current, left = generator.choice(waiting), int(generator.expovariate(0.08)) + 1
        left -= 1
        return current

    return choose


@pytest.mark.long
def test_one_is_frozen_before_each_of_its_operations(store: Store) -> None:
    """The other takes over and ends before the first goes on."""
    operations, frozen_at = 0, 0
    while frozen_at <= operations:
        order = happen(
            store, Url(f"memory://run-{frozen_at}"), ["a", "b"], paused("a", frozen_at), 2
        )
        operations = max(operations, order.count("a"))
        frozen_at += 1
    assert operations > 60


@pytest.mark.long
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(30), id="30"),
        pytest.param(
            range(30, 3000), id="2970", marks=[pytest.mark.chaos, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_three_in_any_order(store: Store, seeds: range) -> None:
    for seed in seeds:
        happen(store, Url(f"memory://random-{seed}"), ["a", "b", "c"], in_bursts(seed))


def without_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "check", lambda held: files.names(held.root))


def without_own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(_: object, step: int) -> Url:
        return Url(f"memory://wrong/step-{step:08d}")

    monkeypatch.setattr(Lease, "claim", claim)


def without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.history.counts", lambda *_: True)


def without_limits_of_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "may_remove", lambda *_: True)


@pytest.mark.parametrize(
    "break_it", [without_looks, without_own_folders, without_history, without_limits_of_removal]
)
def test_each_part_of_the_protocol_is_needed(
    store: Store,
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, some order loses a checkpoint or mixes two trainings."""
    break_it(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError)):
        try_many(store)


def try_many(store: Store) -> None:
    root = Url("memory://wrong")
    orders = [paused("a", frozen_at) for frozen_at in range(120)]
    for choose in [*orders, *map(in_bursts, range(60))]:
        files.remove_folder(root, first=".none")
        happen(store, root, ["a", "b"], choose)
