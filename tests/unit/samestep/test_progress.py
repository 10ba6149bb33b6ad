"""One line on a terminal, lines at times elsewhere, and the time left on both."""

from __future__ import annotations

import io
import logging
import re

import pytest

import samestep.progress
from samestep.progress import Progress, clock, ends_in
from samestep.terminal import Console


class Time:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(samestep.progress, "time", time)
    return time


def test_without_a_terminal_a_line_is_logged_at_times_with_the_time_left(
    time: Time, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with Progress("evaluating", 100, done=10, console=Console(file=io.StringIO())) as progress:
        for now in range(1, 41):  # a unit a second
            time.now = now
            progress.advance()
    assert [record.getMessage() for record in caplog.records] == [
        "evaluating, 25/100, 1:15 left",
        "evaluating, 40/100, 1:00 left",
    ]


@pytest.mark.parametrize("options", [{"total": None}, {"total": 10, "logs": False}])
def test_what_is_not_to_be_shown_is_not_logged(
    options: dict[str, int], time: Time, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with Progress("evaluating", console=Console(file=io.StringIO()), **options) as progress:
        for item in progress.track(range(5)):
            time.now = 100.0 * item
    assert not caplog.records


def test_on_a_narrow_terminal_it_stays_one_line_whose_time_left_is_seen(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    with Progress("building", 1.0, console=console, stays=True) as progress:
        progress.update(0.25, note=200 * "n", left=ends_in(110, 140))
    # Drawn over and over, each time from the start of the same line.
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    states = text.strip().split("\r")
    assert not any("\n" in state or len(state) > 60 for state in states)
    drawn = states[-1]
    assert "25%" in drawn
    assert "ends in 1:50 to 2:20" in drawn
    assert "nnn" in drawn
    assert not caplog.records


def test_durations_are_read_like_a_clock():
    assert [clock(seconds) for seconds in (-3, 0.4, 59.6, 750, 11100)] == [
        *("0:00", "0:00", "1:00", "12:30", "3:05:00")
    ]
