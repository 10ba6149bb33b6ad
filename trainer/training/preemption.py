"""Stopping on request: a signal, a step that all ranks agree on, a checkpoint, an exit code."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep import log
from samestep.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError, DataError
from trainer.checkpoint.manager import Checkpointer
from trainer.strategies.world import World

logger = logging.getLogger(__name__)

TOGETHER_SECONDS = 1.0
"""Signals within this time are one request: a batch system may signal every process, and a launcher
may forward its own signal to them."""

_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Config:
    """What happens when the machine is about to be taken away.

    Attributes:
        signals: request a checkpoint after the current step or the next one, and exit code 75; 130
            after SIGINT, which is Ctrl-C. A signal more than a second after the first ends the run
            at once. SIGHUP, of a terminal that is closed, and SIGINT are left ignored where they
            are, as under nohup. [] leaves all signals their usual meaning, and is needed to train
            outside of a program's main thread.
        deadline: seconds from the signal to the exit, checkpoint included. A process that takes
            longer exits with 128 + signal, and the run continues from its newest checkpoint.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
    deadline: float = 120.0

    def __post_init__(self) -> None:
        for name in self.signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(
                    f"signals has {name!r}, which is not a signal that can be caught; use SIGTERM "
                    "or SIGUSR1"
                )
        if not self.deadline > 0:
            raise ConfigError(f"deadline must be above 0 seconds, not {self.deadline}")

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        return tuple(signal.Signals[name] for name in self.signals)


class StopRequest:
    """Handles signals inside a `with` block and lets all ranks agree on a step to stop after.

    A thread reads the signals from the interpreter's wake-up descriptor, which the kernel's handler
    writes to. So a second signal and the deadline end the process even if its main thread hangs in
    a collective.

    Args:
        joins: whether `join` will be called. Until then the process waits for other ranks and has
            nothing to save, so a signal ends it at once.

    Attributes:
        asked: the signal that this process has received.
        agreed: all ranks know that one of them has, or that one has an error ahead.
        error: an error that one of the next batches of this process will raise.
    """

    def __init__(self, config: Config, joins: bool = False) -> None:
        self.asked: signal.Signals | None = None
        self.agreed = False
        self.error: DataError | None = None
        self._is_waiting = joins
        self._step = 0
        self._checkpointer: Checkpointer | None = None
        self._config = config
        # A group of its own, as the sum runs beside collectives of the training step.
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def __enter__(self) -> StopRequest:
        # Without signals, nothing is taken that only the main thread has.
        if self._config.signals:
            self._catch()
        return self

    def _catch(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        # set_wakeup_fd requires a non-blocking descriptor.
        self._sender.setblocking(False)
        # Handlers that do nothing: without any, the default action would end the process.
        self._before = {
            number: signal.signal(number, lambda *_: None)
            for number in self._config.numbers
            # A shell's background jobs ignore Ctrl-C, and those under nohup the terminal's end.
            if not (number in _OF_TERMINAL and signal.getsignal(number) is signal.SIG_IGN)
        }
        # A full socket loses only repeated signals, so a warning would be noise.
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop-request", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        if not self._config.signals:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sender.close()  # ends the thread

    def join(self, world: World) -> None:
        """Creates the process group for the agreement. Collective."""
        self._is_waiting = False
        if world.size > 1:
            self._group = world.host_group()

    def decide(
        self,
        step: int,
        checkpointer: Checkpointer | None = None,
        error: DataError | None = None,
    ) -> bool:
        """Whether to stop now. All ranks call this after each step and get the same answer.

        Each rank may receive the signal during another step. So the flags are summed over ranks;
        the sum started after one step is read after the next, and no rank waits for it. If rank 1
        is signaled during step 5, all ranks stop after step 6.

        Args:
            step: number of steps taken.
            checkpointer: of the run; it knows which steps are saved.
            error: that one of the next batches of this rank will raise. Several ranks can save
                before it is raised, but not after: by then the others are in the next step.
        """
        self._step, self._checkpointer = step, checkpointer
        if self._group is None:
            self.agreed = self.asked is not None
            return self.agreed
        # The flag is reused, so the previous sum must have ended before the next one begins.
        if self._pending is not None:
            self._pending.wait()
            self.agreed = bool(self._flag)
        if not self.agreed:
            self.error = error
            self._flag.fill_(int(self.asked is not None or error is not None))
            self._pending = dist.all_reduce(self._flag, group=self._group, async_op=True)
        return self.agreed

    def finish(self) -> None:
        """Waits for the last sum, before the ranks leave the process group."""
        if self._pending is not None:
            self._pending.wait()

    @property
    def exit_code(self) -> int:
        """Exit code after a stop: an elastic run may continue on machines that got no signal."""
        if self.asked is None:
            return EXIT_REGROUP
        return 128 + signal.SIGINT if self.asked == signal.SIGINT else EXIT_PREEMPTED

    def _listen(self) -> None:
        first = self._next_signal(math.inf)
        if first is None:
            return
        self.asked, since = first, time.monotonic()
        # Main thread and ranks may hang in a rendezvous, and nothing has to be saved.
        if self._is_waiting:
            logger.info("stopping     on %s: training has not begun", first.name)
            log.exit_now(self.exit_code)
        again = ". Ctrl-C again: at once" if first == signal.SIGINT else ""
        logger.info("stopping     on %s, after this step and a checkpoint%s", first.name, again)
        while True:
            try:
                number = self._next_signal(since + self._config.deadline)
            except TimeoutError:
                logger.warning(
                    "stopping took longer than preemption.deadline, %g s", self._config.deadline
                )
                number = first
                break
            if number is None:
                return
            # Schedulers often signal the group and each process: these count as one.
            if time.monotonic() > since + TOGETHER_SECONDS:
                logger.info(
                    "stopping     at once: a second signal (%s); %s", number.name, self._lost()
                )
                break
        # Not sys.exit, which would only end this thread.
        log.exit_now(128 + number)

    def _lost(self) -> str:
        """What ending now costs."""
        saved = 0 if self._checkpointer is None else self._checkpointer.saved or 0
        if self._step == saved:
            return "no step is lost"
        return f"the same command repeats steps {saved + 1} to {self._step}"

    def _next_signal(self, deadline: float) -> signal.Signals | None:
        """Waits for one of the configured signals; None at the end of the `with` block."""
        while True:
            seconds = deadline - time.monotonic()
            # Not 0, which would make the socket non-blocking.
            self._receiver.settimeout(None if math.isinf(seconds) else max(0.001, seconds))
            received = self._receiver.recv(1)
            if not received:
                self._receiver.close()
                return None
            # The descriptor reports all signals that have a handler in Python.
            if received[0] in self._config.numbers:
                return signal.Signals(received[0])
