"""Hung runs: which rank is responsible, and where in its program it is.

Each process publishes its place in the program. A process that makes no progress reads what the
others have published. Hardware, drivers and collectives take no part: a thread looks at the main
thread's Python stack, so it works with any back-end, and when everything else has stopped.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from samestep import log, storage
from samestep.errors import EXIT_FAILED, HangError
from samestep.stored_json import JsonError, parse_json
from trainer.strategies.world import World
from trainer.training.observers import Observer

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_LOOKS = 20  # consecutive looks that must find the main thread in the same place
_LONG = ("compilation", "checkpoint")  # parts that may take arbitrarily long
_CLOCK_SECONDS = 60.0  # by which clocks of machines, and two beats, may be apart
_GRACE = 3  # beats within which a living process publishes again
_DUMP_SECONDS = 10.0  # for the flight recorder
_HUNG = "hung"  # the store's key of the rank that ends the run
# (module, function) -> the part of the loop that it stands for, in the order of a step. If several
# are on a stack, the innermost counts.
PARTS = {
    ("data_pipeline.reading.loader", "StreamingLoader.__next__"): "data fetch",
    ("trainer.training.passes", "accumulate_gradients"): "forward",
    ("trainer.strategies", "Strategy.backward"): "backward",
    ("trainer.strategies.xla.spmd", "XlaSpmd.backward"): "backward",
    ("trainer.strategies", "Strategy.clip_grad_norm"): "optimizer",
    ("trainer.strategies", "Strategy.step"): "optimizer",
    ("trainer.accelerators.kinds.xla", "XlaAccelerator._compile"): "compilation",
    ("trainer.training.loop", "Trainer._log_training"): "logging",
    ("trainer.training.loop", "Trainer.evaluate"): "evaluation",
    ("trainer.training.preemption", "StopRequest.decide"): "waiting for the device",
    ("trainer.training.loop", "Trainer.save"): "checkpoint",
    ("trainer.training.checkpoints", "Checkpoints.wait_for_snapshot"): "checkpoint",
    # Waits for the last save at the end of a run.
    ("trainer.checkpoint.manager", "Checkpointer.settle"): "checkpoint",
}
ELSEWHERE = "the training loop"
_COLLECTIVES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "trainer.strategies.announcements",
)
# A rank in an earlier part of the same step is behind.
_ORDER = [*dict.fromkeys(PARTS.values()), ELSEWHERE]


@dataclass(frozen=True)
class Place:
    """The place of a thread in the program.

    Attributes:
        doing: the part of the loop.
        collective: the name of the collective that it waits in, or "". DDP waits in C++ during a
            backward pass, and a GPU after the host has gone on; neither shows in a Python stack.
            The thread is in "backward" then, or in the part that waits for the device next.
        exact: each function on the stack, and the current instruction in it.
    """

    doing: str
    collective: str
    exact: tuple[tuple[int, int], ...]


def place_of(thread: int) -> Place:
    """The place of the living thread with this identifier."""
    doing = collective = ""
    exact = []
    for frame, _ in traceback.walk_stack(sys._current_frames()[thread]):  # innermost first
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        doing = doing or PARTS.get((module, name), "")
        if module in _COLLECTIVES:
            collective = name  # the outermost: an all_gather_object consists of others
        exact.append((id(frame.f_code), frame.f_lasti))
    return Place(doing or ELSEWHERE, collective, tuple(exact))


def all_stacks() -> str:
    """The stacks of all threads of this process, the main thread's first."""
    frames = sys._current_frames()
    stacks = [(thread.name, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
    return "\n".join(
        f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks if frame
    )


@dataclass(frozen=True)
class Beat:
    """The state that a process publishes.

    Attributes:
        rank: its rank.
        node: host name of its machine.
        pid: process ID on that machine.
        time: of publication, by its own clock, in seconds since 1970.
        step: the step that it computes.
        doing: the part of the loop that it is in.
        collective: the collective that it waits in, or "".
        seconds: time since it has entered that part or collective.
        what: while it waits for data, the address of its oldest request; else "".
        patient: whether it may take arbitrarily long: in the first step of a phase, in a
            compilation, or in a checkpoint.
    """

    rank: int
    node: str
    pid: int
    time: float
    step: int
    doing: str
    collective: str
    seconds: float
    what: str
    patient: bool


class Heartbeat(Observer):
    """A thread that publishes the main thread's place, and ends a run that hangs.

    The run ends with one line that names the rank to blame.

    A process hangs if neither its step nor its place in the program has changed for `timeout`. It
    then reads the beats of the other ranks. A rank that does not publish is to blame (a stopped
    process, a dead machine). If all publish, it is the rank that is furthest behind among those
    that wait in no collective. As long as all ranks publish, a run may stay in a compilation, in
    the first step of a phase (which compiles), or in a checkpoint (which waits for storage): errors
    there end by the time-outs of collectives and storage.

    Use as a context manager around `Trainer.fit`, in the thread that trains.

    Args:
        world: the processes of the run.
        timeout: seconds without progress until the run ends; None disables the thread.
        folder: each living rank writes its stacks there when the run ends, as rank-N.txt.
        alert: called with an explanation, once on every living rank, before the run ends.
    """

    def __init__(
        self, world: World, timeout: float | None, folder: Path, alert: Callable[[str], None]
    ) -> None:
        self._world, self._folder, self._alert = world, folder, alert
        self._interval = _BEAT_SECONDS if timeout is None else min(_BEAT_SECONDS, timeout / _LOOKS)
        self._limit = None if timeout is None else round(timeout / self._interval)
        self._step, self._patient = 0, True

    def begin_step(self, step: int, first: bool, look: bool = False) -> None:
        """Reports that the main thread begins a step; the `first` one of a phase may take long."""
        self._step, self._patient = step, first

    def __enter__(self) -> Self:
        self._main, self._closed = threading.get_ident(), threading.Event()
        if self._limit is not None:
            threading.Thread(
                target=self._run, args=(self._limit,), name="heartbeat", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _run(self, limit: int) -> None:
        shared = self._world.store
        store = shared and shared.clone()  # type: ignore[attr-defined]
        try:
            self._beat_on(store, limit)
        except RuntimeError:  # the store is gone, and `World` ends the process
            pass
        except Exception as error:
            logger.warning("a hang of this rank will not be noticed any more: %r", error)

    def _beat_on(self, store: Store | None, limit: int) -> None:
        """Publishes at each interval until the context is left.

        Args:
            store: for beats of all ranks; None for a single process.
            limit: number of intervals without progress that are a hang.
        """
        last: tuple[int, Place] | None = None
        spot, since, still, told = (0, "", ""), time.monotonic(), 0, False
        before: dict[int, Beat] = {}
        closed = self._closed  # after a rewind, `self` has the event of the next thread
        while not closed.wait(self._interval):
            step, place = now = self._step, place_of(self._main)
            if spot != (step, place.doing, place.collective):
                spot, since = (step, place.doing, place.collective), time.monotonic()
            # Beats are counted instead of seconds: a process that was stopped for a while has not
            # been hanging.
            still, last = still + 1 if now == last else 0, now
            mine = self._beat(step, place, time.monotonic() - since)
            if store is not None:
                store.set(_key(self._world.rank), json.dumps(asdict(mine)))
                if not told and (told := store.check([_HUNG])):
                    self._write_stacks(mine)
                    self._write_collectives()
            # Ranks whose beats are equal at `limit` and at `limit + _GRACE` are silent.
            if still == limit:
                before = self._read(store, mine)
            elif still == limit + _GRACE:
                beats = self._read(store, mine)
                silent = [rank for rank, beat in beats.items() if before.get(rank) == beat]
                starting = len(beats) < self._world.size
                if silent or not (starting or any(beat.patient for beat in beats.values())):
                    self._end(store, mine, explain(beats, silent))
                still = 0

    def _beat(self, step: int, place: Place, seconds: float) -> Beat:
        asked = storage.under_way() if place.doing == "data fetch" else []
        return Beat(
            rank=self._world.rank,
            node=platform.node(),
            pid=os.getpid(),
            time=time.time(),
            step=step,
            doing=place.doing,
            collective=place.collective,
            seconds=seconds,
            what=asked[0] if asked else "",
            patient=self._patient or place.doing in _LONG,
        )

    def _read(self, store: Store | None, mine: Beat) -> dict[int, Beat]:
        """The last beat of each rank that has published."""
        if store is None:
            return {mine.rank: mine}
        keys = [_key(rank) for rank in range(self._world.size)]
        if not store.check(keys):  # one request if all have published, which is the usual case
            keys = [key for key in keys if store.check([key])]
        beats = {}
        for text in store.multi_get(keys):
            with suppress(JsonError):  # of a rank with a broken memory
                beat = parse_json(text, Beat)
                beats[beat.rank] = beat
        return beats

    def _end(self, store: Store | None, mine: Beat, reason: str) -> None:
        """Ends the run, unless another rank is about to."""
        if store is not None and int(store.compare_set(_HUNG, "", str(mine.rank))) != mine.rank:
            return
        self._write_stacks(mine)
        error = HangError(
            f"the run hangs: {reason}; the stacks of the ranks that live are in {self._folder}. "
            "Run the same command to continue from the newest checkpoint (an elastic run does so "
            "by itself). If the run was only slow, raise training.hang_timeout."
        )
        if store is not None:
            # The other ranks write their stacks with their next beat.
            time.sleep((_GRACE - 0.5) * self._interval)
            self._world.failed(error)
        # The main thread hangs, so this thread reports the error and ends the process.
        logger.error("error: %s", error)
        self._write_collectives()
        log.exit_now(EXIT_FAILED if store is None else error.exit_code)

    def _write_stacks(self, mine: Beat) -> None:
        header = f"rank {mine.rank} ({mine.node}, pid {mine.pid}), {time.ctime()}: "
        header += f"{mine.doing} of step {mine.step}\n\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank-{mine.rank}.txt").write_text(
                header + all_stacks(), encoding="utf-8"
            )
        except OSError as error:
            logger.warning("the stacks cannot be written to %s: %s", self._folder, error)
        self._alert(
            f"{explain({mine.rank: mine}, [])}; the log's last line and the stacks in "
            f"{self._folder} name the rank to blame"
        )

    def _write_collectives(self) -> None:
        """Writes the last collectives of this rank, as torch has recorded them, for its analyzer.

        The recorder asks the device for the state of each. With a broken driver that may take
        forever, under the interpreter's lock, so this comes last, and the process ends by a timer.
        """
        if self._world.size == 1:
            return
        faulthandler.dump_traceback_later(_DUMP_SECONDS, exit=True, file=2)
        try:
            file = self._folder / f"collectives-{self._world.rank}"
            file.write_bytes(_recorded_collectives())
        except (
            AttributeError,
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # another torch has no recorder
            logger.warning("the last collectives cannot be written: %s", error)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _recorded_collectives() -> bytes:
    """The content of torch's flight recorder, in its analyzer's format."""
    from torch._C import _distributed_c10d as recorder

    # NCCL has a recorder of its own.
    name = "nccl" if dist.get_backend() == "nccl" else "fr"
    recorded: bytes = getattr(recorder, f"_dump_{name}_trace")()
    return recorded


def explain(beats: Mapping[int, Beat], silent: Sequence[int]) -> str:
    """Names, in one line, the ranks that hold up a run and the places of the others.

    Args:
        beats: by rank.
        silent: the ranks that have stopped publishing.
    """
    if silent:
        guilty = [beats[rank] for rank in silent]
        # Approximate: it compares the clocks of different machines. If these differ, or one is set,
        # it is known at least that a living rank has waited for so long.
        living = [beat for rank, beat in beats.items() if rank not in silent]
        newest = max(beat.time for beat in beats.values())
        longest = max(newest - beat.time for beat in guilty)
        most = max((beat.seconds for beat in living), default=longest)
        state = f"no sign of life for {min(longest, most + _CLOCK_SECONDS):.0f} s, at last"
    else:
        # Ranks in a collective wait for a rank that is in none.
        busy = [beat for beat in beats.values() if not beat.collective] or list(beats.values())
        behind = min(map(_progress, busy))
        guilty = [beat for beat in busy if _progress(beat) == behind]
        state = f"{max(beat.seconds for beat in guilty):.0f} s"
    who = ", ".join(f"rank {beat.rank} ({beat.node}, pid {beat.pid})" for beat in guilty[:4])
    if len(guilty) > 4:
        who += f" and {len(guilty) - 4} more ranks"
    line = f"{who}: {state} {_where(guilty[0])}"
    others = Counter(_where(beat) for beat in beats.values() if beat not in guilty)
    for where, count in others.most_common():
        line += f"; {count} other{'s' * (count > 1)} {where}"
    return line


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, _ORDER.index(beat.doing)


def _where(beat: Beat) -> str:
    if beat.collective:
        return f"waiting in {beat.collective} of step {beat.step}"
    what = f" {beat.what}" if beat.what else ""
    return f"in {beat.doing}{what} of step {beat.step}"


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
