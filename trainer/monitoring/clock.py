"""Time spent in each section of a step, on the device's timeline, without waiting for the device.

On a GPU the host runs ahead of the device, so a host clock would charge the device's work to
whatever the host happens to wait in. A mark is an event in the device's queue instead: the time
between two marks is what the device needed for the work between them, or was idle. Waiting for data
counts only if the device runs out of work meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from trainer.accelerators import Accelerator

_PAUSES = ("evaluation", "checkpoint")
_LAST = "optimizer"  # section of a step


class Reading(NamedTuple):
    """Time since the last reading.

    Attributes:
        seconds: by section.
        steps: seconds of each step that ended, without pauses. Time between two steps, such as for
            logging, counts in the later one.
        pauses: name and seconds of each evaluation and checkpoint.
    """

    seconds: dict[str, float]
    steps: list[float]
    pauses: list[tuple[str, float]]


class Clock:
    """Divides all time into named sections; the first one starts at once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last = accelerator.mark()
        self._sections: list[tuple[str, object, object]] = []
        # Seconds of the open step, as far as they were read.
        self._step = 0.0

    def end_section(self, name: str) -> None:
        """Records the time since the last call under `name`."""
        mark = self._accelerator.mark()
        self._sections.append((name, self._last, mark))
        self._last = mark

    def read(self) -> Reading:
        """Returns the time since the last reading; waits for the device."""
        seconds: dict[str, float] = defaultdict(float)
        steps: list[float] = []
        pauses: list[tuple[str, float]] = []
        for name, begin, end in self._sections:
            elapsed = self._accelerator.seconds(begin, end)
            seconds[name] += elapsed
            if name in _PAUSES:
                pauses.append((name, elapsed))
                continue
            self._step += elapsed
            if name == _LAST:
                steps.append(self._step)
                self._step = 0.0
        # `_last` stays: the time since the last mark belongs to the next section that ends.
        self._sections = []
        return Reading(dict(seconds), steps, pauses)
