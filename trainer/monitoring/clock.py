"""Time spent in each section of a step, on the device's timeline, without waiting for the device.

On a GPU the host runs ahead of the device, so a host clock would charge the device's work to
whatever the host happens to wait in. A mark is an event in the device's queue instead: the time
between two marks is what the device needed for the work between them, or was idle. Waiting for data
counts only if the device runs out of work meanwhile.
"""

from __future__ import annotations

from collections import defaultdict

from trainer.accelerators import Accelerator


class Clock:
    """Divides all time into named sections; the first one starts at once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last = accelerator.mark()
        self._sections: list[tuple[str, object, object]] = []

    def end_section(self, name: str) -> None:
        """Records the time since the last call under `name`."""
        mark = self._accelerator.mark()
        self._sections.append((name, self._last, mark))
        self._last = mark

    def read(self) -> dict[str, float]:
        """Returns the seconds of each section since the last reading; waits for the device."""
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in self._sections:
            seconds[name] += self._accelerator.seconds(begin, end)
        # `_last` stays: the time since the last mark belongs to the next section that ends.
        self._sections = []
        return dict(seconds)
