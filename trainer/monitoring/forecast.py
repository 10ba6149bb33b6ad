"""When a run or a suite ends: a range, from the steps measured so far."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.monitoring.clock import Reading

_WARM_UP = 2  # the first steps of a process compile, allocate and fill caches
_FEWEST = 3  # steps to forecast from
_RECENT = 2000  # steps: a machine that has become slower stays slower
_BLOCKS = 10
_MARGIN = 0.05  # other load on the machine changes


class Range(NamedTuple):
    """Seconds, or seconds per unit of work."""

    low: float
    middle: float
    high: float

    def times(self, count: float) -> Range:
        """The time of `count` such things."""
        return Range(*(count * each for each in self))

    def plus(self, other: Range) -> Range:
        """The time of both, if both are short or both are long."""
        return Range(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Schedule:
    """What a run still has to do.

    Attributes:
        steps: number of steps of the whole run.
        work_until: work of all steps before a given one, in any unit that time is proportional to.
        evaluate_every: steps between evaluations; None for none.
        evaluation_batches: batches of an evaluation.
        save_every: steps between checkpoints, of each kind; there is one more at the end.
    """

    steps: int
    work_until: Callable[[int], float]
    evaluate_every: int | None = None
    evaluation_batches: int = 0
    save_every: Sequence[int] = ()

    def pauses(self, step: int) -> dict[str, int]:
        """Number of evaluations and checkpoints to come, `step` included."""
        # A row of metrics is written before its step's evaluation. Every 10 of 25 steps, at step
        # 10: at 10 and 20, and for checkpoints the one at the end.
        counts = {
            "checkpoint": sum(
                self.steps // every - (step - 1) // every for every in self.save_every
            )
            + (1 if self.save_every and self.steps % self.save_every[0] else 0)
        }
        if self.evaluate_every is not None:
            every = self.evaluate_every
            counts["evaluation"] = self.steps // every - (step - 1) // every
        return counts


class TimeLeft:
    """Forecasts the end of a run from the measured steps, evaluations and checkpoints.

    Args:
        step: the step that the process starts from.
        schedule: of the run.
    """

    def __init__(self, step: int, schedule: Schedule) -> None:
        self._step, self._schedule = step, schedule
        self._skip = _WARM_UP
        # Seconds per unit of work, of each step.
        self._rates: deque[float] = deque(maxlen=_RECENT)
        self._pauses: dict[str, list[float]] = defaultdict(list)
        self._forward = 0.0

    def measure(self, step: int, reading: Reading) -> Range | None:
        """Adds the steps since the last call; returns the seconds left after `step`.

        Returns:
            None before enough steps are measured.
        """
        work_until = self._schedule.work_until
        # Steps that were computed again, or skipped for a fault, count in the step after them.
        work = (work_until(step) - work_until(self._step)) / max(1, len(reading.steps))
        for seconds in reading.steps:
            if self._skip:
                self._skip -= 1
            elif work > 0:
                self._rates.append(seconds / work)
        if reading.steps:
            self._forward = reading.seconds.get("forward", 0.0) / len(reading.steps)
        for name, seconds in reading.pauses:
            self._pauses[name].append(seconds)
        self._step = step
        if len(self._rates) < _FEWEST:
            return None
        left = rate_of(self._rates).times(work_until(self._schedule.steps) - work_until(step))
        for name, count in self._schedule.pauses(step).items():
            left = left.plus(self._pause(name).times(count))
        return left

    def _pause(self, name: str) -> Range:
        """The seconds of an evaluation or a checkpoint."""
        if measured := self._pauses[name]:
            return Range(0.9 * min(measured), statistics.mean(measured), 1.1 * max(measured))
        # None was measured yet. An evaluation is forward passes without dropout; a checkpoint
        # copies the state, which takes about as long as a few steps.
        if name == "evaluation":
            batches = self._schedule.evaluation_batches
            return Range(0.3, 0.8, 1.5).times(batches * self._forward)
        step = statistics.median(self._rates) * self._schedule.work_until(1)
        return Range(0.0, 1.0, 5.0).times(step)


def rate_of(rates: Sequence[float] | deque[float]) -> Range:
    """Returns the range in which the mean of many more such steps will lie.

    Args:
        rates: at least one, in the order of the steps.
    """
    values = np.asarray(rates, dtype=np.float64)
    # Means of blocks of consecutive steps: the sum of many steps varies less than a step, and a
    # block keeps the rare slow steps that a median of single steps would lose. One step that took
    # a hundred times as long as the others makes one block slow, which the quantiles leave out.
    blocks = [block.mean() for block in np.array_split(values, min(_BLOCKS, len(values)))]
    low, middle, high = np.quantile(blocks, (0.1, 0.5, 0.9)).tolist()
    # Slow times are further from the middle than fast ones: other programs can make a step take
    # three times as long, and nothing makes it take a third.
    high += 0.5 * (high - middle)
    # Few steps say less: 10 % of margin more for 9 steps, 3 % for 100.
    margin = _MARGIN + 0.3 / math.sqrt(len(values))
    return Range(low * (1 - margin), middle, high * (1 + margin))


def suite_left(
    finished: Sequence[tuple[str, int, float]],
    missing: Sequence[tuple[str, int]],
    slots: int,
) -> Range | None:
    """Forecasts the end of a suite of runs.

    Args:
        finished: task, steps and seconds of each finished run.
        missing: task and steps left of each other run.
        slots: number of runs at a time.

    Returns:
        Seconds; None before a run has finished.
    """
    rates: Mapping[str, list[float]] = defaultdict(list)
    for task, steps, seconds in finished:
        rates[task].append(seconds / max(1, steps))
    if not rates:
        return None
    every = [rate for found in rates.values() for rate in found]
    left = Range(0.0, 0.0, 0.0)
    for task, steps in missing:
        # Runs of a task resemble each other. Of a task without a finished run, only the times of
        # other tasks are known, which may have shorter or longer texts.
        rate = rate_of(rates[task]) if rates[task] else _of_others(every)
        left = left.plus(rate.times(steps))
    # At the end, some slots are idle while the last run ends.
    longest = max((steps for _, steps in missing), default=0) * max(every)
    busy = left.times(1 / max(1, min(slots, len(missing) or 1)))
    return Range(busy.low, busy.middle, busy.high + (longest if slots > 1 else 0.0))


def _of_others(rates: Sequence[float]) -> Range:
    return Range(0.5 * min(rates), statistics.median(rates), 2 * max(rates))
