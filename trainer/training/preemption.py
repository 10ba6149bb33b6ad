"""Stopping on request: a signal, a step that all ranks agree on, a checkpoint, an exit code."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep import log
from samestep.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError, DataError
from trainer.checkpoint.manager import Checkpointer
from trainer.strategies import Strategy
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
        signals: request a checkpoint after one of the next steps, and exit code 75; 130 after
            SIGINT, which is Ctrl-C. A signal more than a second after the first ends the run
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

    Each rank may receive the signal during another step. So a flag of each rank is added up in the
    all-reduce of each step's weights (`trainer.training.passes.global_weights`), and costs no
    collective and no connection of its own. gloo's ring takes 2 (N - 1) messages one after another:
    0.1 to 0.2 s for 1,024 ranks.

    Where the device runs behind the host (`Accelerator.runs_behind`), the sum is read a step later,
    so that the host can enqueue a step while the device computes the one before. Say rank 1 is
    signaled in the middle of step 5. Its flag travels in step 6, and all ranks stop after step 6 on
    CPUs, and after step 7 on GPUs.

    Args:
        joins: whether `join` will be called. Until then the process waits for other ranks and has
            nothing to save, so a signal ends it at once.

    Attributes:
        asked: the signal that this process has received.
        agreed: all ranks know that one of them has, or that one has an error ahead.
        error: an error that one of the next batches of this process will raise.
        shares: whether this process shares its flag with other ranks.
    """

    def __init__(self, config: Config, joins: bool = False) -> None:
        self.asked: signal.Signals | None = None
        self.agreed = False
        self.error: DataError | None = None
        self._is_waiting = joins
        self._step = 0
        self._checkpointer: Checkpointer | None = None
        self._config = config
        self.shares = False
        # Sums of flags that have not been read, and how many of the newest are left for later.
        self._sums: deque[Callable[[], float]] = deque()
        self._left = 0

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
        """Begins to stop together with the other ranks."""
        self._is_waiting = False
        self.shares = world.size > 1

    def find(self, error: DataError | None) -> None:
        """Asks for a stop before an error that one of the next batches of this rank will raise.

        Several ranks can save before it is raised, but not after: by then the others are in the
        next step. All ranks call this before each step.
        """
        if self.shares and not self.agreed:
            self.error = error

    def all_reduce(self, strategy: Strategy, weights: Tensor) -> Tensor:
        """Sums weights over all ranks, and the flags with them.

        Args:
            weights: a host tensor in fp64 of any shape. Weights 3 and 1 and the flag 0 travel as
                [3, 1, 0].
        """
        if not self.shares:
            return strategy.all_reduce(weights)
        flag = float(self.asked is not None or self.error is not None)
        message = torch.cat((weights.flatten(), weights.new_tensor([flag])))
        summed = strategy.all_reduce(message)
        self._sums.append(strategy.accelerator.read_later(summed[-1]))
        self._left = int(strategy.accelerator.runs_behind)
        return summed[:-1].view(weights.shape)

    def decide(self, step: int, checkpointer: Checkpointer | None = None) -> bool:
        """Whether to stop now. All ranks call this after each step and get the same answer.

        Args:
            step: number of steps taken.
            checkpointer: of the run; it knows which steps are saved.
        """
        self._step, self._checkpointer = step, checkpointer
        if not self.shares:
            self.agreed = self.asked is not None
        # On a GPU, the sums of steps 5 and 6 are there after step 6, and the one of step 5 is read.
        while len(self._sums) > self._left:
            self.agreed |= self._sums.popleft()() > 0
        return self.agreed

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
        when = "after one of the next steps and a checkpoint"
        logger.info("stopping     on %s, %s%s", first.name, when, again)
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
