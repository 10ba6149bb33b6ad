"""`python -m tests.fail_points`: lets each system call of an elastic run fail, once.

Writes what came of it to docs/reliability.md.

Two agents with their hosts, keepers and workers run as threads of this process. The first run
counts the calls of the code under test. Each of the following makes one call fail, once, as SQLite
tests its handling of errors. The number of polls differs from run to run, so a call is named by the
line that makes it and its count there.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import os
import platform
import queue
import resource
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

from samestep.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REGROUP, SamestepError
from samestep.storage import channel, keeper
from samestep.storage.urls import KEEPER
from tests.ports import free_port
from trainer.elastic import agent, host, rendezvous, rounds
from trainer.elastic.agent import Elastic, _Agent
from trainer.elastic.workers import Exit

BOUND_SECONDS = 20.0  # until both agents must have ended
ENDED = ("went on", "ended with a message")
OUTCOMES = (*ENDED, "raw traceback", "waited", "left something behind")
PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- begin: written by tests.fail_points -->\n", "<!-- end of fail points -->"
_PARTS = {
    "the agent": ("elastic/agent.py", "strategies/neighbor.py"),
    "the rendezvous and its host": (
        "elastic/rendezvous.py",
        "elastic/rounds.py",
        "elastic/host.py",
    ),
    "the keeper": ("storage/keeper.py",),
    "connections": ("storage/channel.py",),
}

_ROOT = Path(__file__).parents[1]
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("samestep", "trainer"))
_CALLS: Sequence[tuple[Any, str]] = (
    *(
        (socket.socket, name)
        for name in (
            "__init__", "accept", "bind", "connect", "getpeername", "getsockname", "listen", "recv",
            "recv_into", "sendall", "setsockopt", "settimeout", "shutdown",
        )
    ),
    *((os, name) for name in ("open", "fsync", "listdir", "replace", "stat", "mkdir", "unlink")),
    *((selectors.DefaultSelector, name) for name in ("register", "unregister", "select")),
    (socket, "getaddrinfo"),
    (io, "open"),
    (builtins, "open"),
    (resource, "getrlimit"),
    (threading.Thread, "start"),
    (rounds, "TCPStore"),
    (agent, "TCPStore"),
)  # fmt: skip
ERRORS: Mapping[str, Callable[[], Exception]] = {
    "EMFILE": lambda: OSError(errno.EMFILE, "Too many open files"),
    "ECONNRESET": lambda: OSError(errno.ECONNRESET, "Connection reset by peer"),
    "ETIMEDOUT": lambda: OSError(errno.ETIMEDOUT, "Connection timed out"),
    "RuntimeError": lambda: RuntimeError("can't start new thread"),
}
_QUICK = {
    rounds: {
        "POLL_SECONDS": 0.02,
        "PATIENCE_SECONDS": 4.0,
        "ALIVE_SECONDS": 0.1,
        "SILENT_SECONDS": 0.8,
        "_LAST_CALL_SECONDS": 0.3,
        "_ENDING_SECONDS": 1.0,
    },
    host: {"_RENEW_SECONDS": 0.1, "_KEEP_SECONDS": 0.5, "_SILENT_SECONDS": 0.8},
    rendezvous: {"_GREETING_SECONDS": 1.0},
    channel: {"HANDSHAKE_SECONDS": 1.0, "_SEND_SECONDS": 1.0},
    keeper: {"_TIMEOUT_SECONDS": 1.0},
    agent: {"_POLL_SECONDS": 0.02, "_LEAVE_SECONDS": 0.3},
}


@dataclass(frozen=True)
class Point:
    """A call that fails: where it is made, which of the calls there, and with which error."""

    place: str
    count: int
    error: str

    def __str__(self) -> str:
        return f"{self.place} #{self.count} {self.error}"


@dataclass
class Calls:
    """Counts the calls of the code under test, and lets one of them fail."""

    point: Point | None = None
    counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, name: str) -> None:
        """Raises the error of the point if this call is it."""
        caller = sys._getframe(2)
        for _ in range(12):
            if caller is None:
                return
            file = caller.f_code.co_filename
            if file.startswith(_OURS):
                break
            caller = caller.f_back
        else:
            return
        module = Path(*Path(file).relative_to(_ROOT).parts[1:]).as_posix()
        place = f"{module}:{caller.f_code.co_qualname}:{caller.f_lineno} {name}"
        with self._lock:
            self.counts[place] += 1
            count = self.counts[place]
        if self.point is not None and (place, count) == (self.point.place, self.point.count):
            raise ERRORS[self.point.error]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in _CALLS:
                stack.enter_context(mock.patch.object(owner, name, self._wrap(owner, name)))
            yield

    def _wrap(self, owner: Any, name: str) -> Callable[..., Any]:
        call, text = getattr(owner, name), f"{owner.__name__}.{name}"

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.check(text)
            return call(*arguments, **options)

        return wrapped


class ThreadWorkers:
    """Workers as threads: they meet in the round's store, write to the keepers and read there."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self._killed = threading.Event()

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._killed = threading.Event()
        for each in environments:
            threading.Thread(target=self._work, args=(each, self._killed), daemon=True).start()

    def signal(self, _: signal.Signals) -> None:
        self._killed.set()

    def ended(self, seconds: float) -> Exit | None:
        with suppress(queue.Empty):
            return self._ended.get(timeout=seconds)
        return None

    def _work(self, environment: Mapping[str, str], killed: threading.Event) -> None:
        code = EXIT_CRASHED
        with suppress(OSError, RuntimeError):
            code = self._train(environment, killed)
        self._ended.put(Exit(int(environment["LOCAL_RANK"]), code))

    def _train(self, environment: Mapping[str, str], killed: threading.Event) -> int:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3))
        secret = bytes.fromhex(environment[keeper.SECRET_ENVIRONMENT])
        store.set(f"keeper/{rank}", environment[KEEPER])

        def meet(name: str) -> bool:
            store.add(name, 1)
            while store.add(name, 0) < size:
                if killed.wait(0.02):
                    return False
            return True

        if not meet("begin"):
            return EXIT_REGROUP
        keepers = [store.get(f"keeper/{each}").decode() for each in range(size)]
        with suppress(OSError):  # the run goes on without a snapshot
            upload = keeper.Upload(tuple(keepers), secret, f"snapshots/{rank}")
            with closing(upload):
                upload.write(b"weights")
            keeper.request(keepers[0], secret, "get", [f"snapshots/{rank}"], 0, 7)
        return EXIT_DONE if meet("end") else EXIT_REGROUP


@dataclass
class Ending:
    """How a scenario ended; `outcome` is one of OUTCOMES."""

    outcome: str
    details: list[str]
    calls: Counter[str]


def run(folder: Path, point: Point | None = None) -> Ending:
    """Runs the scenario; the call at `point` fails."""
    calls, results, hosts = Calls(point), ["", ""], []
    folder.mkdir(parents=True, exist_ok=True)
    settings = Elastic(1, 2, f"127.0.0.1:{free_port()}", True, folder)
    raised: list[str] = []

    def live(number: int) -> None:
        try:
            code = _Agent(ThreadWorkers(), "train", 1, settings, ()).run()  # type: ignore[arg-type]
            results[number] = f"exit code {code}"
        except SamestepError as error:
            results[number] = f"message: {error}"
        except BaseException as error:
            results[number] = f"raised: {error!r}"

    def hosting(*arguments: Any) -> rounds.Host:
        hosts.append(rounds.Host(*arguments))
        return hosts[-1]

    with ExitStack() as stack:
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        for module, values in _QUICK.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        stack.enter_context(mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}))
        stack.enter_context(mock.patch.object(rendezvous, "Host", hosting))
        stack.enter_context(mock.patch.object(_Agent, "_recorded_signals", nullcontext))
        stack.enter_context(
            mock.patch.object(threading, "excepthook", lambda each: raised.append(repr(each)))
        )
        agents = [threading.Thread(target=live, args=(each,), daemon=True) for each in (0, 1)]
        for each in agents:
            each.start()
        with calls.installed():
            deadline = time.monotonic() + BOUND_SECONDS
            for each in agents:
                each.join(max(0.0, deadline - time.monotonic()))
        left = _left_behind(folder)
        for each in hosts:  # in a run, their processes have ended
            if each._renewal is not None:
                each._renewal.is_over = True
            if each.is_alive():
                each.join(5)
    details = [*filter(None, results), *raised, *left]
    if any(not result for result in results):
        outcome = "waited"
    elif raised or any(result.startswith("raised") for result in results):
        outcome = "raw traceback"
    elif left:
        outcome = "left something behind"
    elif all(result == f"exit code {EXIT_DONE}" for result in results):
        outcome = "went on"
    else:
        outcome = "ended with a message"
    return Ending(outcome, details, calls.counts)


def _left_behind(folder: Path) -> list[str]:
    """Temporary files, and records of hosts that somebody renews."""

    def records() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in folder.glob(".host-*")}

    before = records()
    time.sleep(3 * host._RENEW_SECONDS)
    names = [name for name, content in records().items() if before.get(name) != content]
    return names + [each.name for each in folder.glob("*.tmp")]


def points(folder: Path) -> list[Point]:
    """All points: the first, second and middle call of each line, and each error."""
    counts = run(folder).calls
    return [
        Point(place, count, error)
        for place, most in sorted(counts.items())
        for count in sorted({1, min(2, most), (most + 1) // 2})
        for error in ERRORS
        if "Thread.start" not in place or error == "RuntimeError"
    ]


def render(endings: Sequence[tuple[Point, Ending]]) -> str:
    """The table of docs/reliability.md."""
    parts: dict[str, Counter[str]] = {}
    for point, ending in endings:
        parts.setdefault(_part(point), Counter())[ending.outcome] += 1
    parts["all"] = sum(parts.values(), Counter())
    head = f"| calls of | points | {' | '.join(OUTCOMES)} |\n|{'---|' * (2 + len(OUTCOMES))}\n"
    rows = (
        f"| {part} | {counts.total()} | {' | '.join(str(counts[each]) for each in OUTCOMES)} |\n"
        for part, counts in parts.items()
    )
    return f"{head}{''.join(rows)}\n{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}.\n"


def _part(point: Point) -> str:
    module = point.place.partition(":")[0]
    return next((part for part, names in _PARTS.items() if module in names), "files")


def main() -> int:
    """Runs all points; returns 1 if one of them came to anything but `ENDED`."""
    endings = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = points(Path(folder, "calls"))
        for number, point in enumerate(chosen):
            ending = run(Path(folder, str(number)), point)
            endings.append((point, ending))
            if ending.outcome not in ENDED:
                sys.stdout.write(f"{point}: {ending.outcome}: {'; '.join(ending.details)}\n")
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + render(endings) + END + rest.partition(END)[2], encoding="utf-8"
    )
    return int(any(ending.outcome not in ENDED for _, ending in endings))


if __name__ == "__main__":
    sys.exit(main())
