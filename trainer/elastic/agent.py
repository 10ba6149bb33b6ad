"""The agent: starts a run's workers on this machine, restarts them, and reports their outcome."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samestep.environment import launcher_rank, omp_threads
from samestep.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_REGROUP,
    ConfigError,
    LaunchError,
)
from samestep.storage import keeper
from samestep.storage.keeper import Keeper
from samestep.storage.urls import KEEPER
from trainer.checkpoint.files import Location
from trainer.checkpoint.lock import GROUP, Group
from trainer.elastic.rendezvous import Rendezvous, RunEnded
from trainer.elastic.rounds import Round
from trainer.elastic.workers import Exit, Main, Workers
from trainer.strategies.agreement import Facts
from trainer.strategies.neighbor import interface_of, loopback_only, own_address
from trainer.strategies.world import FAILURE, PROGRESS
from trainer.training.preemption import TOGETHER_SECONDS

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 5.0  # for workers whose peers are gone to report and exit
_MAX_RESTARTS = 3  # without a newer checkpoint
_AGAIN = "run the same command again to continue from the newest checkpoint"


@dataclass(frozen=True)
class Elastic:
    """A run that survives the loss of workers and machines, and takes in new machines.

    Attributes:
        min_machines: number of machines that the run needs.
        max_machines: number of machines that it may have.
        rendezvous: HOST:PORT where the agents join.
        secrets_folder: where agents that know the rendezvous find the run's secret; None if there
            is only this one.
        snapshots: whether agents keep snapshots for their workers, see
            `trainer.training.checkpoints`.
        facts: returns the facts that must be equal on all machines.
    """

    min_machines: int = 1
    max_machines: int = 1
    rendezvous: str = "127.0.0.1:0"
    snapshots: bool = False
    secrets_folder: Location | None = None
    facts: Callable[[], Facts] = dict

    @classmethod
    def parse(
        cls,
        machines: str,
        rendezvous: str | None,
        snapshots: bool = False,
        secrets_folder: Location | None = None,
        facts: Callable[[], Facts] = dict,
    ) -> Elastic:
        """Reads MIN:MAX (or N for both) and HOST:PORT of the command line.

        Raises:
            ConfigError: `machines` is not MIN:MAX, several machines have no rendezvous, or a
                launcher has started this process.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", machines)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(
                f"--elastic is {machines}. Write MIN:MAX with 1 <= MIN <= MAX, such as 1:4."
            )
        if rendezvous is None and most > 1:
            raise ConfigError(
                f"--elastic {machines} means several machines, which need a rendezvous. Add "
                "--rendezvous HOST:PORT with one machine of the run and a free port on it, the "
                "same on all machines."
            )
        if launcher_rank() is not None:
            raise ConfigError(
                "--elastic starts the processes of a run, but a launcher has already started this "
                "one (RANK and WORLD_SIZE are set); leave out one of the two"
            )
        if rendezvous is None:
            return cls(least, most, cls.rendezvous, snapshots)
        return cls(least, most, rendezvous, snapshots, secrets_folder, facts)


def run_workers(
    main: Main,
    arguments: Sequence[str],
    processes: int,
    elastic: Elastic | None = None,
    preemption: Sequence[signal.Signals] = (),
) -> int:
    """Runs `main(arguments)` in `processes` workers of one run; returns the run's exit code.

    A worker that fails says why on stderr; then the others are stopped.

    Args:
        main: entry point of the command line; it reads its rank from the environment.
        processes: number of workers on this machine.
        elastic: how the run survives failures; with None the first failure ends it.
        preemption: signals on which workers save and stop; they are passed on to the workers.

    Raises:
        LaunchError: a signal ended a worker or all of them, without a message from them.
        KeyboardInterrupt: the user pressed Ctrl-C, and the workers have ended.
    """
    threads = omp_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    os.environ["OMP_NUM_THREADS"] = str(threads)
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
        settings = elastic or Elastic()
        self._rendezvous = Rendezvous(
            settings.rendezvous,
            settings.min_machines,
            settings.max_machines,
            run,
            settings.secrets_folder,
            settings.facts(),
        )
        self._workers, self._processes, self._preemption = workers, processes, preemption
        self._is_elastic, self._snapshots = elastic is not None, settings.snapshots
        self._several_machines = settings.secrets_folder is not None
        self._keeper: Keeper | None = None
        self._received: list[tuple[signal.Signals, float]] = []  # signals not handled yet
        # The signal that asked the run to stop and its time, and one that came later.
        self._stop: tuple[signal.Signals, float] | None = None
        self._second_signal: signal.Signals | None = None
        self._kill_at = math.inf
        self._regrouping = False  # this round's workers must stop for a machine that has joined
        self._progress, self._failures = "", 0  # newest checkpoint, and failures since then

    def run(self) -> int:
        """Runs rounds until the run has ended; returns its exit code."""
        try:
            with self._recorded_signals():
                code = self._run_rounds()
        except (EOFError, BrokenPipeError):
            raise LaunchError(f"the process that starts the workers was killed; {_AGAIN}") from None
        except (OSError, RuntimeError) as error:  # no more files, threads or memory
            raise LaunchError(
                f"cannot go on: {error!r}. Check this machine's memory and limits (ulimit -a); "
                f"{_AGAIN}"
            ) from error
        except RunEnded as ended:
            if ended.code:
                raise LaunchError(f"the run has ended on another machine: {ended}") from None
            return EXIT_DONE
        except LaunchError as error:
            self._end_run(EXIT_FAILED, str(error))
            raise
        else:
            self._end_run(code, "its messages say why")
            return code
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._rendezvous.leave()

    def _end_run(self, code: int, reason: str) -> None:
        # A preempted agent leaves alone: the other machines may continue.
        if self._stop is None and code != EXIT_PREEMPTED:
            self._rendezvous.close(code, reason)

    def _run_rounds(self) -> int:
        while True:
            joined = self._rendezvous.join(self._processes, cancelled=lambda: bool(self._received))
            if joined is None:  # a signal came before there were workers
                self._handle_signals()
                code = self._judge(Round(0, 0, 0), [Exit(0, EXIT_REGROUP)])
            else:
                self._workers.start(self._environments(joined))
                code = self._judge(joined, self._supervise())
            if code is not None:
                return code

    def _environments(self, joined: Round) -> list[dict[str, str]]:
        shared = {
            "WORLD_SIZE": str(joined.world_size),
            "LOCAL_WORLD_SIZE": str(self._processes),
            "MASTER_ADDR": self._rendezvous.host,
            "MASTER_PORT": str(joined.port),
            # The rendezvous hosts a new store each round; rank 0 must not host another one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
            **loopback_only(self._rendezvous.host),
        }
        if self._several_machines:
            run = self._rendezvous.derived_secret("groups").hex()
            shared[GROUP] = str(Group(run, joined.order))
        if self._snapshots:
            secret = self._rendezvous.derived_secret("keepers")
            if self._keeper is None:  # one for all rounds, or restarts would lose the snapshots
                own = own_address(self._rendezvous.host, joined.port)
                self._keeper = Keeper(secret, own, interface_of(own))
            shared[KEEPER] = self._keeper.address
            shared[keeper.SECRET_ENVIRONMENT] = secret.hex()
        return [
            shared | {"RANK": str(joined.first_rank + index), "LOCAL_RANK": str(index)}
            for index in range(self._processes)
        ]

    def _supervise(self) -> list[Exit]:
        """Waits until all workers have ended; returns their exits in order.

        Workers that were killed here count as one exit with EXIT_REGROUP.
        """
        exits: list[Exit] = []
        alive, killed = self._processes, False
        self._regrouping, self._kill_at = False, math.inf
        while alive:
            ended = self._workers.ended(_POLL_SECONDS)
            if ended is not None:
                alive -= 1
                if not killed:
                    exits.append(ended)
                # The others cannot work without a worker that has failed. One that a signal killed
                # could not even tell them, so they may hang in a collective. One that aborts may
                # itself follow another one, which has yet to say why it fails.
                if ended.code:
                    told = ended.code > 0 or ended.code == -signal.SIGABRT
                    self._kill_within(_LEAVE_SECONDS if told else 0)
            self._handle_signals()
            self._handle_event()
            if not killed and time.monotonic() >= self._kill_at:
                killed = True
                exits.append(Exit(0, EXIT_REGROUP))
                self._workers.signal(signal.SIGKILL)
        return exits

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _handle_event(self) -> None:
        event = self._rendezvous.event()
        if event == "lost":
            self._kill_within(_LEAVE_SECONDS)
        elif event == "joined" and not self._regrouping and self._stop is None:
            logger.info(
                "another machine has joined: starting again with it, after one of the next steps "
                "and a checkpoint"
            )
            self._regrouping = True
            if self._preemption:
                self._workers.signal(self._preemption[0])
            else:
                self._kill_within(0)

    def _handle_signals(self) -> None:
        while self._received:
            number, when = self._received.pop(0)
            if self._stop is None:
                self._stop = number, when
                if number not in self._preemption:
                    # Ctrl-C reaches the workers from the terminal, so they are already stopping.
                    self._kill_within(_LEAVE_SECONDS if number == signal.SIGINT else 0)
                elif not self._regrouping:
                    # Workers that regroup have their signal: a second one would end them at once.
                    self._workers.signal(number)
            elif when > self._stop[1] + TOGETHER_SECONDS:
                self._second_signal = number
                # It reaches the workers too, who say what is lost.
                self._workers.signal(number)
                self._kill_within(1)

    def _judge(self, joined: Round, exits: list[Exit]) -> int | None:
        """Returns the run's exit code after a round, or None if another round follows.

        Raises:
            LaunchError: the run ends with a failure that no worker has explained.
            KeyboardInterrupt: the user has ended it.
        """
        # Workers that only regroup follow the failure of another one, which is the cause.
        failures = [self._cause(joined, ended) for ended in exits if ended.code]
        causes = [ended for ended in failures if ended.code != EXIT_REGROUP]
        local_rank, code = (causes or failures or exits)[0]
        if self._stop is not None:
            number = self._stop[0]
            if number == signal.SIGINT and number not in self._preemption:
                raise KeyboardInterrupt
            if number not in self._preemption:
                raise LaunchError(f"stopped by {number.name}; {_AGAIN}")
            if self._second_signal is not None:
                return 128 + self._second_signal
            # The signal came before the workers handled it: none had started, or it killed them.
            if code == EXIT_REGROUP or -code in self._preemption:
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                return EXIT_PREEMPTED
        elif self._regrouping:
            # Workers may have saved, or the signal came too early, or they took too long.
            expected = {EXIT_PREEMPTED}
            for number in self._preemption:
                expected |= {-number, 128 + number}
            if code in expected:
                return None
        if code == EXIT_REGROUP and not self._is_elastic:
            return EXIT_FAILED
        if code == EXIT_REGROUP:
            logger.info(
                "another machine stopped: starting again from the newest checkpoint with those "
                "that are there"
            )
            return None
        if code >= 0 and code != EXIT_CRASHED:
            return code
        rank = joined.first_rank + local_rank
        what = "failed" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = "; the kernel does that when memory runs out (see dmesg)"
        if self._is_elastic and self._stop is None:
            self._count_failure(joined, what + hint)
            logger.warning("rank %d %s: starting again from the newest checkpoint", rank, what)
            return None
        if code == EXIT_CRASHED:
            return EXIT_FAILED
        raise LaunchError(f"rank {rank} {what}{hint}; {_AGAIN}")

    def _cause(self, joined: Round, ended: Exit) -> Exit:
        """Replaces an abort that follows another rank's failure by that failure.

        Libraries abort a process when the other end of a collective is gone.
        """
        if ended.code != -signal.SIGABRT:
            return ended
        try:
            failure = self._stored(joined, FAILURE)
        except RuntimeError:  # the store is gone with its host
            return Exit(ended.local_rank, EXIT_REGROUP)
        if not failure:
            return ended
        rank, code = map(int, failure.split())
        local_rank = rank - joined.first_rank
        if local_rank == ended.local_rank:
            return ended
        if 0 <= local_rank < self._processes:
            return Exit(local_rank, code)
        return Exit(ended.local_rank, EXIT_REGROUP)  # that rank's agent counts its failure

    def _stored(self, joined: Round, key: str) -> str:
        """Reads a key of a round's store; "" if there is none.

        Raises:
            RuntimeError: the store is gone.
        """
        store = TCPStore(
            self._rendezvous.host, joined.port, is_master=False, timeout=timedelta(seconds=2)
        )
        return store.get(key).decode() if store.check([key]) else ""

    def _count_failure(self, joined: Round, what: str) -> None:
        """Raises a LaunchError after too many failures without a newer checkpoint in between."""
        progress = ""
        with suppress(RuntimeError):  # the store is gone with its host
            progress = self._stored(joined, PROGRESS)
        self._failures = self._failures + 1 if progress == self._progress else 1
        self._progress = progress
        if self._failures > _MAX_RESTARTS:
            raise LaunchError(
                f"a worker {what}: {self._failures} times in a row, each time before there was a "
                f"checkpoint newer than step {progress or 0}; look into the reason, then {_AGAIN}"
            )

    @contextmanager
    def _recorded_signals(self) -> Iterator[None]:
        """Records signals when they come; `_handle_signals` acts on them between two polls."""

        def record(number: int, frame: object) -> None:
            self._received.append((signal.Signals(number), time.monotonic()))

        numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *self._preemption}
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, record)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
