"""Rows that wait until their step is safe."""

from __future__ import annotations

import json

import pytest

from samestep.errors import SamestepError
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.monitoring import Tracker
from trainer.strategies.kinds.single import Config
from trainer.strategies.world import World
from trainer.training.recorder import Destinations, Recorder


class Rows(Tracker):
    """Keeps the steps of what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, step: int, metrics: object) -> None:
        self.steps.append(step)


def open_recorder() -> tuple[Recorder, Rows]:
    strategy = Config().build(CpuAccelerator(), World.start(10), "fp32")
    strategy.all_reduce = lambda value, op="sum": value  # type: ignore[method-assign]
    recorder, rows = Recorder(strategy), Rows()
    recorder.open(0, Destinations([rows]))
    return recorder, rows


def test_rows_wait_until_they_are_released() -> None:
    recorder, rows = open_recorder()
    with recorder.held_rows(True):
        recorder.log(1, {})
        assert rows.steps == []
        recorder.release()
        recorder.log(2, {})
        assert rows.steps == [1]
    assert rows.steps == [1, 2]
    with recorder.held_rows(False):
        recorder.log(3, {})
        assert rows.steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "steps"), [(SamestepError("a loss of nan"), [1]), (RuntimeError("gloo"), [])]
)
def test_after_the_failure_of_another_rank_they_are_not_written(
    error: Exception, steps: list[int]
) -> None:
    recorder, rows = open_recorder()

    def fail() -> None:
        with recorder.held_rows(True):
            recorder.log(1, {})
            raise error

    with pytest.raises(type(error)):
        fail()
    assert rows.steps == steps


@pytest.mark.parametrize(("written", "missing"), [([], [4, 4]), ([3, 4], [4]), ([3, 4, 4], [])])
def test_a_checkpoint_has_rows_that_the_run_may_not_have_written(
    written: list[int], missing: list[int]
) -> None:
    recorder, _ = open_recorder()
    with recorder.held_rows(True):
        recorder.log(4, {"train/loss": 1.0})
        recorder.log(4, {"heldout/loss": 2.0})
        state = json.loads(json.dumps({**recorder.state_dict(), "step": 4}))
    again, rows = open_recorder()
    again.load_state_dict(state, tokens=0)
    again.drop_written([{"step": step} for step in written])
    with again.held_rows(True):
        assert rows.steps == missing
