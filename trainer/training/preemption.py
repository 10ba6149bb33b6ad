"""Stopping on request: a signal, a step that all ranks agree on, a checkpoint, and an exit code that says so."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from trainer.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError
from trainer.strategies.world import host_group

logger = logging.getLogger(__name__)

TOGETHER_SECONDS = 1.0
"""Signals within this time are one request: a batch system may signal each process, and a launcher pass its own on."""


@dataclass(frozen=True)
class Config:
    """What happens when the machine is about to be taken away.

    Attributes:
        signals: those that ask the run to save a checkpoint after the step it is in, or the next, and to exit with code
            75. One that comes more than a second after the first ends it at once. [] leaves signals their usual
            meaning.
        deadline: seconds from the signal to the exit, checkpoint included. A process that is not done by then exits
            with 128 + signal, and the run goes on from the newest checkpoint that is committed.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    deadline: float = 120.0

    def __post_init__(self) -> None:
        for name in self.signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(
                    f"signals has {name!r}, which is no signal that can be caught; use SIGTERM or SIGUSR1"
                )
        if not self.deadline > 0:
            raise ConfigError(f"deadline must be above 0 seconds, not {self.deadline}")

    @property
    def numbers(self) -> tuple[signal.Signals, ...]:
        """The signals."""
        return tuple(signal.Signals[name] for name in self.signals)


class StopRequest:
    """Whether the run is to stop: what the signals of all ranks come to. Handles signals inside a `with` block.

    A thread reads the signals from the interpreter's wake-up descriptor, which the kernel's handler writes to. So a
    second signal and the deadline end the process even when its main thread hangs in a collective.
    """

    def __init__(self, config: Config) -> None:
        self.asked = False
        self.agreed = False
        self._config = config
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def __enter__(self) -> StopRequest:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._before = {
            number: signal.signal(number, lambda *_: None) for number in self._config.numbers
        }
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop-request", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sender.close()  # ends the thread

    def join(self, world_size: int) -> None:
        """Readies the agreement; called by all ranks once they can communicate."""
        if world_size > 1:
            self._group = host_group()

    def decide(self) -> bool:
        """Whether to stop now; called by all ranks after each step, and answered alike.

        The sum over ranks that is started after one step is read after the next, so that no rank waits for it.
        """
        if self._group is None:
            self.agreed = self.asked
            return self.agreed
        if self._pending is not None:
            self._pending.wait()
            self.agreed = bool(self._flag)
        if not self.agreed:
            self._flag.fill_(int(self.asked))
            self._pending = dist.all_reduce(self._flag, group=self._group, async_op=True)
        return self.agreed

    def finish(self) -> None:
        """Waits for the last of the sums, before the ranks part."""
        if self._pending is not None:
            self._pending.wait()

    @property
    def exit_code(self) -> int:
        """Of this process when all have agreed: whoever was not asked itself may go on without those who were."""
        return EXIT_PREEMPTED if self.asked else EXIT_REGROUP

    def _listen(self) -> None:
        first = self._next_signal(math.inf)
        if first is None:
            return
        self.asked, since = True, time.monotonic()
        logger.info("stopping     on %s, after this step and a checkpoint", first.name)
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
            if time.monotonic() > since + TOGETHER_SECONDS:
                logger.warning("a second signal (%s): stopping at once", number.name)
                break
        logging.shutdown()
        os._exit(128 + number)

    def _next_signal(self, deadline: float) -> signal.Signals | None:
        """Waits for one of the configured signals; None at the end of the `with` block."""
        while True:
            seconds = deadline - time.monotonic()
            self._receiver.settimeout(None if math.isinf(seconds) else max(0.001, seconds))
            received = self._receiver.recv(1)
            if not received:
                self._receiver.close()
                return None
            if received[0] in self._config.numbers:
                return signal.Signals(received[0])
