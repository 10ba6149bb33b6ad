"""The agent: starts the worker processes of a run on this machine, starts them again, and reports for them."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.elastic.rendezvous import Group, Over, Rendezvous
from trainer.elastic.workers import Main, Workers
from trainer.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_REGROUP,
    ConfigError,
    LaunchError,
)
from trainer.storage import keeper
from trainer.storage.keeper import Keeper
from trainer.strategies.neighbour import own_address
from trainer.strategies.world import PROGRESS
from trainer.training.preemption import TOGETHER_SECONDS

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 5.0  # for the last words of workers whose peers are gone
_VAIN_RESTARTS = 3
_AGAIN = "run the same command again to go on from the newest checkpoint"


@dataclass(frozen=True)
class Elastic:
    """A run that goes on when workers or machines die, and takes in those that come.

    Attributes:
        least: machines that it needs.
        most: machines that it may have.
        rendezvous: HOST:PORT where their agents meet.
        snapshots: whether the agents keep snapshots for the workers, see `trainer.training.checkpoints`.
    """

    least: int = 1
    most: int = 1
    rendezvous: str = "127.0.0.1:0"
    snapshots: bool = False

    @classmethod
    def parse(cls, machines: str, rendezvous: str | None, snapshots: bool = False) -> Elastic:
        """Reads MIN:MAX (or N, for both) and HOST:PORT of the command line.

        Raises:
            ConfigError: the first is not of that form, more than one machine has no place to meet, or a launcher has
                started this process.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", machines)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(
                f"--elastic {machines} is no MIN:MAX; give the number of machines, such as 1:4"
            )
        if rendezvous is None and most > 1:
            raise ConfigError(
                f"--elastic {machines} is about several machines, which must meet somewhere: add --rendezvous "
                "HOST:PORT, with one machine of the run and a free port of it, the same on all of them"
            )
        if under_launcher():
            raise ConfigError(
                "--elastic starts the processes of a run and watches them, but a launcher has started this one already "
                "(RANK and WORLD_SIZE are set); leave out one of the two"
            )
        return cls(least, most, rendezvous or cls.rendezvous, snapshots)


def under_launcher() -> bool:
    """Whether a launcher (torchrun, or ourselves) has already started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_workers(
    main: Main,
    arguments: Sequence[str],
    processes: int,
    elastic: Elastic | None = None,
    preemption: Sequence[signal.Signals] = (),
) -> int:
    """Runs `main(arguments)` in `processes` processes that form one run; returns the run's exit code.

    When one fails the others are stopped, and it has said on stderr what went wrong.

    Args:
        main: the command line's entry, which is to find out from the environment that it is one of several.
        arguments: of the command line.
        processes: on this machine.
        elastic: how the run survives deaths; None ends it.
        preemption: the signals upon which workers save and stop; they are passed on to them.

    Raises:
        LaunchError: a signal ended a process or all of them, which is a death without a word.
        KeyboardInterrupt: the user pressed Ctrl-C; the processes have ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    with Workers(main, arguments, preemption) as workers:
        return _Agent(workers, shlex.join(arguments), processes, elastic, preemption).run()


class _Agent:
    def __init__(
        self,
        workers: Workers,
        run: str,
        processes: int,
        elastic: Elastic | None,
        preemption: Sequence[signal.Signals],
    ) -> None:
        place = elastic or Elastic()
        self._rendezvous = Rendezvous(place.rendezvous, place.least, place.most, run)
        self._workers, self._processes = workers, processes
        self._elastic, self._snapshots, self._preemption = (
            elastic is not None,
            place.snapshots,
            preemption,
        )
        self._received: list[tuple[signal.Signals, float]] = []
        self._stop: tuple[signal.Signals, float] | None = (
            None  # the signal that asked to stop, and when it came
        )
        self._impatience: signal.Signals | None = None  # a later one
        self._kill_at = math.inf
        self._asked = False  # whether the workers of this round were asked to make room for an agent that has arrived
        self._progress, self._deaths = "", 0
        self._keeper: Keeper | None = None

    def run(self) -> int:
        """Round after round; returns the exit code of the run."""
        try:
            with self._signals_noted():
                code = self._rounds()
        except (EOFError, BrokenPipeError):
            raise LaunchError(f"the process that starts the workers was killed; {_AGAIN}") from None
        except Over as over:
            if over.code:
                raise LaunchError(f"the run has ended on another machine: {over}") from None
            return EXIT_DONE
        except LaunchError as error:
            self._end_for_all(EXIT_FAILED, str(error))
            raise
        finally:
            if self._keeper is not None:
                self._keeper.close()
        self._end_for_all(code, "its messages say why")
        return code

    def _end_for_all(self, code: int, reason: str) -> None:
        if (
            self._stop is None and code != EXIT_PREEMPTED
        ):  # else only this machine leaves, and others may go on
            self._rendezvous.close(code, reason)

    def _rounds(self) -> int:
        while True:
            group = self._rendezvous.meet(self._processes, cancelled=lambda: bool(self._received))
            if group is None:
                self._heed_signals()
                code = self._judge(Group(0, 0, 0), [(0, EXIT_REGROUP)])
            else:
                self._workers.start(self._environments(group))
                code = self._judge(group, self._supervise())
            if code is not None:
                return code

    def _environments(self, group: Group) -> list[dict[str, str]]:
        shared = {
            "WORLD_SIZE": str(group.world_size),
            "LOCAL_WORLD_SIZE": str(self._processes),
            "MASTER_ADDR": self._rendezvous.host,
            "MASTER_PORT": str(group.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # a new one each round, which no worker is to host
            "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        }
        if self._snapshots:  # kept from round to round
            self._keeper = self._keeper or Keeper(own_address(self._rendezvous.host, group.port))
            shared[keeper.ENVIRONMENT] = self._keeper.address
        return [
            shared | {"RANK": str(group.first_rank + index), "LOCAL_RANK": str(index)}
            for index in range(self._processes)
        ]

    def _supervise(self) -> list[tuple[int, int]]:
        """Returns when all workers have ended: (local rank, exit code) of those that were not killed here, in order."""
        ends: list[tuple[int, int]] = []
        alive, killed = self._processes, False
        self._asked, self._kill_at = False, math.inf
        while alive:
            end = self._workers.ended(_POLL_SECONDS)
            if end is not None:
                alive -= 1
                if not killed:
                    ends.append(end)
                if end[
                    1
                ]:  # a worker that was killed cannot have told the others, and they can do nothing without it
                    self._kill_within(0 if end[1] < 0 else _LEAVE_SECONDS)
            self._heed_signals()
            self._heed_news()
            if not killed and time.monotonic() >= self._kill_at:
                killed = True
                ends.append((0, EXIT_REGROUP))
                self._workers.signal(signal.SIGKILL)
        return ends

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _heed_news(self) -> None:
        news = self._rendezvous.news()
        if news == "lost":
            self._kill_within(_LEAVE_SECONDS)
        elif news == "arrived" and not self._asked and self._stop is None:
            logger.info(
                "another machine has come: starting again with it, after this step and a checkpoint"
            )
            self._asked = True
            if self._preemption:
                self._workers.signal(self._preemption[0])
            else:
                self._kill_within(0)

    def _heed_signals(self) -> None:
        while self._received:
            number, when = self._received.pop(0)
            if self._stop is None:
                self._stop = number, when
                if number not in self._preemption:  # Ctrl-C reaches the workers, too
                    self._kill_within(_LEAVE_SECONDS if number == signal.SIGINT else 0)
                elif (
                    not self._asked
                ):  # or they are about to stop, and a second signal would end them at once
                    self._workers.signal(number)
            elif when > self._stop[1] + TOGETHER_SECONDS:
                logger.warning("a second signal (%s): stopping at once", number.name)
                self._impatience = number
                self._kill_within(0)

    def _judge(self, group: Group, ends: list[tuple[int, int]]) -> int | None:
        """The exit code of the run, given how its workers have ended; None when it goes on with another round.

        Raises:
            LaunchError: it ends with a death that nobody has explained.
            KeyboardInterrupt: the user has ended it.
        """
        failures = [end for end in ends if end[1]]
        rank, code = next(
            (end for end in failures if end[1] != EXIT_REGROUP), (failures or ends)[0]
        )
        if self._stop is not None:
            signalled = self._stop[0]
            if signalled in self._preemption:
                if self._impatience is not None:
                    return 128 + self._impatience
                if (
                    code == EXIT_REGROUP or -code in self._preemption
                ):  # before the workers had begun
                    return EXIT_PREEMPTED
            elif signalled == signal.SIGINT:
                raise KeyboardInterrupt
            else:
                raise LaunchError(f"stopped by {signalled.name}; {_AGAIN}")
        elif self._asked and code in (
            EXIT_PREEMPTED,
            *(sign for n in self._preemption for sign in (-n, 128 + n)),
        ):
            return None  # also when they had not begun, or took too long
        if code == EXIT_REGROUP:
            logger.info(
                "another machine stopped: starting again from the newest checkpoint with those that are there"
            )
            return None if self._elastic else EXIT_FAILED
        if code >= 0 and code != EXIT_CRASHED:
            return code
        what = "failed" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        hint = (
            "; the kernel does that when memory runs out (see dmesg)"
            if -code == signal.SIGKILL
            else ""
        )
        if self._elastic and self._stop is None:
            self._count_death(group, what + hint)
            logger.warning(
                "rank %d %s: starting again from the newest checkpoint",
                group.first_rank + rank,
                what,
            )
            return None
        if code == EXIT_CRASHED:
            return EXIT_FAILED
        raise LaunchError(f"rank {group.first_rank + rank} {what}{hint}; {_AGAIN}")

    def _count_death(self, group: Group, what: str) -> None:
        """Raises a LaunchError when restarts lead nowhere: deaths in a row with no newer checkpoint in between."""
        progress = ""
        with suppress(RuntimeError):  # the store is gone with its host
            store = TCPStore(
                self._rendezvous.host, group.port, is_master=False, timeout=timedelta(seconds=2)
            )
            progress = store.get(PROGRESS).decode() if store.check([PROGRESS]) else ""
        self._deaths = self._deaths + 1 if progress == self._progress else 1
        self._progress = progress
        if self._deaths > _VAIN_RESTARTS:
            raise LaunchError(
                f"a worker {what}: {self._deaths} times in a row, each time before there was a checkpoint newer than "
                f"step {progress or 0}; look into the reason, then {_AGAIN}"
            )

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Signals are put down when they come, and heeded between two looks at the workers."""

        def note(number: int, frame: object) -> None:
            self._received.append((signal.Signals(number), time.monotonic()))

        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *self._preemption}
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
