"""A forecast from the first tenth of a run has the run's true end in its range."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.monitoring.clock import Reading
from trainer.monitoring.forecast import Range, Schedule, TimeLeft, suite_left

RECORDED = json.loads(Path(__file__).with_name("step_times.json").read_text(encoding="utf-8"))
"""By name: the step times and pauses of real runs on two busy cores, in the order of their rows."""


def measure_all(left: TimeLeft, readings: list[Reading]) -> list[tuple[int, Range | None]]:
    found, step = [], 0
    for reading in readings:
        step += len(reading.steps)
        found.append((step, left.measure(step, reading)))
    return found


def forecast_at(name: str, fraction: int) -> tuple[Range, float]:
    """The forecast after 1 / `fraction` of the steps, and the seconds that were really left."""
    run = RECORDED[name]
    readings = [
        Reading({"forward": row["forward"]}, row["steps"], [tuple(each) for each in row["pauses"]])
        for row in run["rows"]
    ]
    total = sum(len(reading.steps) for reading in readings)
    schedule = Schedule(total, float, run["evaluate_every"], run["batches"], [run["save_every"]])
    found = measure_all(TimeLeft(0, schedule), readings)
    times = [sum(each.steps) + sum(time for _, time in each.pauses) for each in readings]
    (row,) = (i for i, (step, _) in enumerate(found) if step == total // fraction)
    forecast = found[row][1]
    assert forecast is not None
    return forecast, sum(times[row + 1 :]) + run["last"]


@pytest.mark.parametrize("name", ["steady", "third"])
def test_from_a_tenth_of_a_recorded_run_the_true_time_is_in_the_range(name: str):
    forecast, true = forecast_at(name, 10)
    assert forecast.low <= true <= forecast.high
    assert forecast.high < 3 * forecast.low  # a range that says something


def test_after_the_machine_has_become_slower_the_forecast_follows():
    # During this run, other programs slowed the steps down to a third from about a tenth on. The
    # first steps cannot tell; a third of the run can.
    early, true = forecast_at("loaded", 10)
    assert early.high < true
    forecast, true = forecast_at("loaded", 3)
    assert forecast.low <= true <= forecast.high


def test_nothing_is_promised_before_steps_are_measured_and_the_warm_up_does_not_count():
    left = TimeLeft(0, Schedule(1000, float))
    compiling = [60.0, 30.0]
    assert left.measure(1, Reading({}, compiling[:1], [])) is None
    assert left.measure(4, Reading({}, [*compiling[1:], 1.0, 1.0], [])) is None
    forecast = left.measure(5, Reading({}, [1.0], []))
    assert forecast is not None
    assert forecast.middle == pytest.approx(995)
    assert forecast.low < 995 < forecast.high < 1400


def test_evaluations_and_checkpoints_to_come_are_in_the_forecast():
    schedule = Schedule(100, float, evaluate_every=10, evaluation_batches=20, save_every=[40])
    # After row 20: the evaluations of steps 20, 30, ... 100, and the checkpoints of 40, 80, 100.
    assert schedule.pauses(20) == {"evaluation": 9, "checkpoint": 3}
    without = TimeLeft(0, Schedule(100, float)).measure(20, Reading({}, 20 * [1.0], []))
    unmeasured = TimeLeft(0, schedule).measure(20, Reading({"forward": 8.0}, 20 * [1.0], []))
    pauses = [("evaluation", 7.0), ("checkpoint", 2.0)]
    measured = TimeLeft(0, schedule).measure(20, Reading({}, 20 * [1.0], pauses))
    assert without is not None
    assert unmeasured is not None
    assert measured is not None
    # 20 batches of 0.4 s forward: an evaluation of 8 s at most 1.5 times that.
    assert unmeasured.high - without.high == pytest.approx(9 * 12 + 3 * 5)
    assert measured.middle - without.middle == pytest.approx(9 * 7 + 3 * 2)


def test_phases_with_longer_sequences_take_longer():
    left = TimeLeft(0, Schedule(200, lambda step: step + 3.0 * max(0, step - 100)))
    forecast = left.measure(50, Reading({}, 50 * [1.0], []))
    assert forecast is not None
    assert forecast.middle == pytest.approx(50 + 4 * 100)


def test_one_step_that_hangs_for_a_while_moves_the_range_little():
    steps = np.full(100, 1.0)
    steps[50] = 300.0
    forecast = TimeLeft(0, Schedule(1000, float)).measure(100, Reading({}, steps.tolist(), []))
    assert forecast is not None
    assert forecast.middle == pytest.approx(900)


def test_a_suite_is_forecast_by_task_and_by_the_runs_at_a_time():
    finished = [("rte", 100, 50.0), ("rte", 100, 54.0), ("sst2", 400, 100.0)]
    missing = [("rte", 100), ("sst2", 400), ("sst2", 400)]
    one, two = (suite_left(finished, missing, slots) for slots in (1, 2))
    assert one is not None
    assert two is not None
    assert one.low < 52 + 200 < one.high
    assert two.middle == pytest.approx(one.middle / 2)
    assert suite_left([], missing, 1) is None
    unknown = suite_left(finished, [("mnli", 1000)], 1)
    assert unknown is not None
    assert unknown.low <= 250 < 540 <= unknown.high
