"""Where the time goes: laps on the device's own clock, without waiting for the device.

On a GPU the host runs ahead, so host clocks would charge the host's waiting to whatever it happens to wait in. A mark
is therefore an event in the device's queue: the time between two marks is what the device spent on the work between
them, or stood idle for want of it. Waiting for data that the device does not notice costs nothing, and counts as that.
"""

from __future__ import annotations

from collections import defaultdict

from trainer.accelerators import Accelerator


class Clock:
    """Divides all time into laps with names; it starts running at once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._last = accelerator.mark()
        self._laps: list[tuple[str, object, object]] = []

    def end_section(self, name: str) -> None:
        """Ends a lap: what the device did since the last one was `name`."""
        mark = self._accelerator.mark()
        self._laps.append((name, self._last, mark))
        self._last = mark

    def read(self) -> dict[str, float]:
        """Seconds by name of the laps since the last reading; waits for the device to end the last of them."""
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in self._laps:
            seconds[name] += self._accelerator.seconds(begin, end)
        self._laps = []
        return dict(seconds)
