"""Some of the system calls of agents, hosts and keepers fail; `tests.fail_points` tries all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fail_points

_TESTS, _POINTS = 4, 4  # tests, and points of each


@pytest.mark.chaos
@pytest.mark.parametrize("number", range(_TESTS))
def test_a_call_that_fails_ends_in_a_run_that_goes_on_or_a_message(
    tmp_path: Path, number: int
) -> None:
    points = fail_points.points(tmp_path / "calls")
    chosen = points[number * len(points) // (_TESTS * _POINTS) :: len(points) // _POINTS]
    for index, point in enumerate(chosen[:_POINTS]):
        ending = fail_points.run(tmp_path / str(index), point)
        assert ending.outcome in fail_points.ENDED, (str(point), ending.details)


def test_a_run_goes_on_after_the_selector_of_its_host_has_failed(tmp_path: Path) -> None:
    points = fail_points.points(tmp_path / "calls")
    (place,) = {each.place for each in points if each.place.endswith("EpollSelector.select")}
    ending = fail_points.run(tmp_path / "run", fail_points.Point(place, 2, "EMFILE"))
    assert ending.outcome == "went on", ending.details
