"""Hung runs: which rank is it, and what is it doing? Each process tells the others where it is.

Who waits, looks it up.

Hardware, drivers and collectives are asked nothing: a thread looks at the main thread's Python
stack, so it works with any back-end, and still does when everything else has stopped.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer import storage
from trainer.errors import EXIT_FAILED, HangError
from trainer.strategies.stacks import ELSEWHERE, PARTS, Place, all_stacks, place_of
from trainer.strategies.world import World

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_LOOKS = 20  # at least so many looks must find the main thread in the same place
_LONG = ("compilation", "checkpoint")  # what may take its time
_GRACE = 3  # beats in which a living process gives another sign of life
_HUNG = "hung"
_ORDER = [
    *dict.fromkeys(PARTS.values()),
    ELSEWHERE,
]  # who is in an earlier part of the same step is behind


@dataclass(frozen=True)
class Beat:
    """What a process tells of itself.

    Attributes:
        rank: its number.
        node: its machine.
        pid: its process there.
        time: when it says so, by its own clock, in seconds since 1970.
        step: the step that it makes.
        doing: the part of the loop that it is in.
        collective: the collective that it is in, or "".
        seconds: since when it is there.
        what: the address that it has asked for longest, while it waits for data; else "".
        patient: whether it may take its time: in the first step of a phase, or to compile, or for a
            checkpoint.
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


class Heartbeat:
    """A thread that publishes where the main thread is, and ends a run that hangs with one line
    about who is to blame.

    A process hangs when neither its step nor the place in its program has changed for the time-out,
    looked at once a second. It then reads what the others have published. A rank without a sign of
    life is to blame (a stopped process, a dead machine); otherwise the rank that is furthest behind
    among those that are in no collective. The first step of a phase, which compiles, other
    compilations, and checkpoints, which wait for storage, are waited for while all ranks live; what
    is wrong there ends at the time-outs of collectives and checkpoints.

    Use as a context manager, in the thread that trains, around nothing but `Trainer.fit`.

    Args:
        world: the processes of the run.
        timeout: seconds without any progress that end the run; None only lets the run go on.
        folder: gets the stacks of all living ranks then, in rank-N.txt.
        alert: called once with an explanation, on every living rank, before any of them ends the
            run.
    """

    def __init__(
        self,
        world: World,
        timeout: float | None,
        folder: Path,
        alert: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._world, self._folder, self._alert = world, folder, alert
        self._interval = _BEAT_SECONDS if timeout is None else min(_BEAT_SECONDS, timeout / _LOOKS)
        self._limit = None if timeout is None else round(timeout / self._interval)
        self._step, self._patient = 0, True

    def begin_step(self, step: int, first: bool) -> None:
        """Says that the main thread begins a step; the first one of a phase may take long."""
        self._step, self._patient = step, first

    def __enter__(self) -> Heartbeat:
        self._main, self._closed = threading.get_ident(), threading.Event()
        if self._limit is not None:
            threading.Thread(
                target=self._run, args=(self._limit,), name="heartbeat", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()

    def _run(self, limit: int) -> None:
        store = None if self._world.store is None else self._world.store.clone()  # type: ignore[attr-defined]
        with suppress(
            RuntimeError
        ):  # the store is gone, and the world's own watch ends the process
            self._beat_on(store, limit)

    def _beat_on(self, store: Store | None, limit: int) -> None:
        last: tuple[int, Place] | None = None
        spot, since, still, told = (0, "", ""), time.monotonic(), 0, False
        before: dict[int, Beat] = {}
        closed = self._closed  # after a rewind, the next thread has another
        while not closed.wait(self._interval):
            step, place = now = self._step, place_of(self._main)
            if spot != (step, place.doing, place.collective):
                spot, since = (step, place.doing, place.collective), time.monotonic()
            # Beats are counted, and not seconds: a process that was stopped for a while has not
            # been hanging.
            still, last = still + 1 if now == last else 0, now
            mine = self._beat(step, place, time.monotonic() - since)
            if store is not None:
                store.set(_key(self._world.rank), json.dumps(asdict(mine)))
                if not told and (told := store.check([_HUNG])):
                    self._write_stacks(mine)
            if still == limit:
                before = self._read(store, mine)
            elif still == limit + _GRACE:
                beats = self._read(store, mine)
                silent = [rank for rank, beat in beats.items() if before.get(rank) == beat]
                waits = len(beats) < self._world.size or any(
                    beat.patient for beat in beats.values()
                )
                if silent or not waits:
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
        """The last beat of each rank that has begun."""
        if store is None:
            return {mine.rank: mine}
        keys = [_key(rank) for rank in range(self._world.size)]
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        beats = [Beat(**json.loads(text)) for text in store.multi_get(keys)]
        return {beat.rank: beat for beat in beats}

    def _end(self, store: Store | None, mine: Beat, reason: str) -> None:
        """Ends the run, unless another rank is about to."""
        if store is not None and int(store.compare_set(_HUNG, "", str(mine.rank))) != mine.rank:
            return
        self._write_stacks(mine)
        error = HangError(
            f"the run hangs: {reason}; the stacks of the ranks that live are in {self._folder}; "
            "the same command goes "
            "on from the newest checkpoint (an elastic run does by itself); raise "
            "training.hang_timeout if this was "
            "only slow"
        )
        if store is not None:
            time.sleep(
                (_GRACE - 0.5) * self._interval
            )  # the others write theirs with their next beat
            self._world.failed(error)
        # The main thread cannot speak, so this one has the last word.
        logger.error("error: %s", error)
        logging.shutdown()
        os._exit(EXIT_FAILED if store is None else error.exit_code)

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


def explain(beats: Mapping[int, Beat], silent: Sequence[int]) -> str:
    """Says in one line who holds up a run, and where the others are.

    Args:
        beats: by rank.
        silent: the ranks that have not beaten lately.
    """
    if silent:
        guilty = [beats[rank] for rank in silent]
        newest = max(beat.time for beat in beats.values())
        state = (
            f"no sign of life for {max(newest - beat.time for beat in guilty):.0f} s, at last {{}}"
        )
    else:
        busy = [beat for beat in beats.values() if not beat.collective] or list(beats.values())
        behind = min(map(_progress, busy))
        guilty = [beat for beat in busy if _progress(beat) == behind]
        state = f"{max(beat.seconds for beat in guilty):.0f} s {{}}"
    who = ", ".join(f"rank {beat.rank} ({beat.node}, pid {beat.pid})" for beat in guilty[:4])
    more = f" and {len(guilty) - 4} more ranks" if len(guilty) > 4 else ""
    others = Counter(_where(beat) for beat in beats.values() if beat not in guilty)
    rest = (f"; {count} other{'s' * (count > 1)} {where}" for where, count in others.most_common())
    return f"{who}{more}: {state.format(_where(guilty[0]))}{''.join(rest)}"


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.step, _ORDER.index(beat.doing)


def _where(beat: Beat) -> str:
    doing = f"in {beat.doing}" + (f" {beat.what}" if beat.what else "")
    return f"{f'waiting in {beat.collective}' if beat.collective else doing} of step {beat.step}"


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
