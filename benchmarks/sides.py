"""The sides of a comparison of training steps: each is a process, and they take turns.

A turn is some untimed steps, then timed ones. On a GPU a side has the memory for itself: after its
turn, its parameters and optimizer state wait in the host's memory. Before the timed steps, untimed
ones bring its memory and the GPU's clock back to where they were.
"""

from __future__ import annotations

import re
import resource
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.pairing import Comparison, in_rounds
from benchmarks.turn_record import StepRecord, StepRecorder
from trainer.accelerators import Accelerator
from trainer.training.compose import build_trainer, open_checkpointer, open_strategy
from trainer.training.experiment import Experiment

LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch\w*Kernel\w*|(cuda|cu|hip)GraphLaunch")
"""Names of the CUDA and HIP calls that start a kernel, or a graph of kernels."""

OUT_OF_MEMORY = re.compile(r"out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """The work of one side; a subclass has the experiment.

    Attributes:
        folder: holds the dataset, and whatever a side writes.
        batch: examples of a step.
        micro_batch: examples of a forward and backward pass.
        device: cpu or cuda.
        threads: threads of the CPU for each side; None leaves the number to torch.
        backend: of torch.compile.
    """

    folder: str
    batch: int
    micro_batch: int
    device: str = "cpu"
    threads: int | None = None
    backend: str = "inductor"

    @abstractmethod
    def experiment(self) -> Experiment:
        """Our side's configuration, from which the other side's model and batches follow."""


@dataclass(frozen=True)
class Turn:
    """The steps of a turn.

    Attributes:
        profiled: counts the kernel launches of the timed steps, which are then slower.
    """

    untimed: int
    timed: int
    profiled: bool = False


@dataclass(frozen=True)
class Measured:
    """The timed steps of a turn.

    Attributes:
        cpu_seconds: of all threads, which other programs on the machine disturb less.
        waited: seconds in which the host waited for batches.
        peak_memory: bytes; of the GPU, in these steps, or of the process, since its start.
        launches: kernel launches; None if they were not counted or there is no GPU.
        began: seconds since 1970.
        by_step: the steps one by one.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    waited: float
    peak_memory: int
    launches: int | None
    began: float
    by_step: list[StepRecord]


class SideFailed(Exception):
    """A side has ended with an error; its message fits into a table."""

    def __init__(self, reason: str, out_of_memory: bool = False) -> None:
        super().__init__(reason, out_of_memory)
        self.reason, self.out_of_memory = reason, out_of_memory

    def __str__(self) -> str:
        return self.reason


class Turns:
    """Stops a side's training loop between turns, and measures it: see `ours` for its use."""

    def __init__(self, device: str, commands: Connection) -> None:
        self._on_gpu = device == "cuda"
        self._commands = commands
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._in_host_memory: list[Tensor] = []
        self._turn, self._step = Turn(0, 1), 0
        self._began = self._cpu_began = self._waited = self._began_at = 0.0
        self._profiler: profile | None = None
        self._recorder = StepRecorder(device)

    def hold(self, model: nn.Module, optimizer: Any) -> None:
        """Names the state that leaves the GPU between turns."""
        self._model, self._optimizer = model, optimizer

    def wait(self) -> bool:
        """Waits for the next turn; returns whether there is one."""
        turn: Turn | None = self._commands.recv()
        if turn is None:
            return False
        for tensor in self._in_host_memory:
            tensor.data = tensor.data.to("cuda")
        self._in_host_memory = []
        self._turn, self._step = turn, -turn.untimed
        if self._step == 0:
            self._start()
        return True

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time within as waiting for a batch."""
        asked = time.perf_counter()
        yield
        self._waited += time.perf_counter() - asked

    def step(self) -> bool:
        """Ends a step, and the turn with its last one; returns whether to take another step."""
        self._step += 1
        if self._step > 0:
            self._recorder.end_step()
        elif self._step == 0:
            self._start()
        if self._step < self._turn.timed:
            return True
        measured = self._stop()
        self._leave_gpu()
        self._commands.send(measured)
        return self.wait()

    def _start(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self._turn.profiled:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._on_gpu else []
            self._profiler = profile(activities=activities)
            self._profiler.start()
        self._waited = 0.0
        self._began_at = time.time()
        self._recorder.start()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def _stop(self) -> Measured:
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds, cpu_seconds = (
            time.perf_counter() - self._began,
            time.process_time() - self._cpu_began,
        )
        launches = None
        if self._profiler is not None:
            self._profiler.stop()
            launches = count_launches(self._profiler) or None
            self._profiler = None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
        if self._on_gpu:
            peak = torch.cuda.max_memory_allocated()
        return Measured(
            self._turn.timed,
            seconds,
            cpu_seconds,
            self._waited,
            peak,
            launches,
            self._began_at,
            self._recorder.records(),
        )

    def _leave_gpu(self) -> None:
        """Moves the state to the host's memory and returns the GPU's memory to the other sides."""
        if not self._on_gpu:
            return
        assert self._model is not None
        parameters = list(self._model.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        states = [each for state in self._optimizer.state.values() for each in state.values()]
        held = [*parameters, *self._model.buffers(), *gradients, *states]
        for tensor in held:
            # A tensor that two of these share has left with the first.
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                # The tensor stays the same object, so optimizer and compiled graphs do not notice.
                # Page-locked memory, which torch keeps for the next turn, is copied faster.
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                tensor.data = host.copy_(tensor.data)
                self._in_host_memory.append(tensor)
        torch.cuda.empty_cache()


def count_launches(profiler: profile) -> int:
    """Number of kernel launches in a profile."""
    events = profiler.key_averages()
    return sum(event.count for event in events if LAUNCH.fullmatch(event.key))


Serve: TypeAlias = Callable[[Any, Turns], None]
"""Trains a job in turns, until there are no more."""


def ours(job: Job, turns: Turns, must_fuse: bool = False) -> None:
    """Our side: the trainer's steps, and the loader's batches, which it makes as it goes.

    Args:
        must_fuse: fails if attention is not fused, so that no table says it was.
    """
    Accelerator.compile_options = {"backend": job.backend}
    experiment = job.experiment()
    with open_strategy(experiment) as strategy:
        checkpointer = open_checkpointer(experiment, strategy.world)
        trainer = build_trainer(experiment, experiment.data.open(), strategy, checkpointer)
        if must_fuse and not getattr(trainer.model, "fuses_attention", False):
            raise SideFailed("no fused attention on this machine")
        trainer.model.train()
        turns.hold(trainer.model, trainer.optimizer)
        batches = iter(trainer.loader)
        going = turns.wait()
        while going:
            with turns.waiting_for_data():
                micro_batches = next(batches)
            trainer.train_step(micro_batches)
            going = turns.step()
        trainer.close()


def theirs(job: Job, turns: Turns, compiled: bool = False) -> None:
    """Hugging Face's side."""
    from benchmarks import huggingface  # our side's process does without transformers

    huggingface.pretrain(job, turns, compiled)


def _serve(serve: Serve, job: Job, commands: Connection) -> None:
    """Runs in a side's process; sends an error to the other end."""
    try:
        serve(job, Turns(job.device, commands))
    except SideFailed as failure:
        commands.send(failure)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)):
            commands.send(SideFailed("out of memory", out_of_memory=True))
        else:
            traceback.print_exc()
            first = next(iter(str(error).splitlines()), "")
            commands.send(SideFailed(f"failed: {type(error).__name__}: {first}"[:200]))


class Side:
    """A side's process, seen from the other end."""

    def __init__(self, serve: Serve, job: Job) -> None:
        # A server that has imported torch, but never touched a GPU, forks the processes. Imports
        # of transformers touch it in some environments, so their side imports it itself.
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.sides"])
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(serve, job, theirs), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would go unnoticed

    def take(self, turn: Turn) -> Measured:
        """Lets the side take a turn.

        Raises:
            SideFailed: it has ended.
        """
        # A side that failed at its start reads nothing more, but has sent its error.
        with suppress(OSError):
            self._commands.send(turn)
        answer: Measured | SideFailed
        try:
            answer = self._commands.recv()
        except (EOFError, OSError):
            self._process.join()
            answer = SideFailed(f"failed: its process ended with {self._process.exitcode}")
        if isinstance(answer, SideFailed):
            self.finish()
            raise answer
        return answer

    def finish(self) -> None:
        """Ends the process."""
        with suppress(OSError):
            self._commands.send(None)
        self._process.join()


def compare_sides(
    title: str, sides: Mapping[str, Serve], job: Job, steps: int, repeats: int
) -> Comparison:
    """Lets sides train a job on the CPU in turns of some steps, after one turn to warm up."""
    started = {name: Side(serve, job) for name, serve in sides.items()}
    measured: dict[str, list[Measured]] = {name: [] for name in sides}
    for number, name in in_rounds(list(sides), range(-1, repeats)):
        found = started[name].take(Turn(untimed=0, timed=steps))
        if number >= 0:
            measured[name].append(found)
    for side in started.values():
        side.finish()
    rates = {
        name: [job.batch * each.steps / each.seconds for each in turns]
        for name, turns in measured.items()
    }
    notes = {name: _notes(turns, job.batch) for name, turns in measured.items()}
    return Comparison(title, "examples", "wall", rates, notes)


def _notes(turns: Sequence[Measured], batch: int) -> str:
    rate = batch * sum(each.steps for each in turns) / sum(each.cpu_seconds for each in turns)
    memory = max(each.peak_memory for each in turns) / 2**30
    waited = sum(each.waited for each in turns) / sum(each.seconds for each in turns)
    return f"{rate:.2f} a CPU-second, peak memory {memory:.1f} GiB, {waited:.1%} waiting for data"
