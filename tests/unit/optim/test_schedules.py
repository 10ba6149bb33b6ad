"""Learning-rate schedules at their corners."""

from __future__ import annotations

import pytest

from trainer.config import decode
from trainer.errors import ConfigError
from trainer.optim.schedules import Schedule, lr_fraction


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_warm_up_is_a_line_from_zero_that_reaches_the_full_rate_at_its_last_step(kind: str):
    config = decode(Schedule, {"decay": kind, "warmup_steps": 10})
    assert [lr_fraction(config, step, 100) for step in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]


def test_linear_decay_is_a_line_to_the_final_fraction():
    config = Schedule("linear", warmup_steps=10, final_fraction=0.2)
    assert [lr_fraction(config, step, 110) for step in (10, 60, 110)] == pytest.approx([1.0, 0.6, 0.2])
    assert lr_fraction(Schedule("linear"), 99, 100) == pytest.approx(0.01)  # the last update still moves the weights


def test_cosine_decay_is_half_a_cosine():
    config = Schedule("cosine", warmup_steps=10, final_fraction=0.1)
    expected = [1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1]
    assert [lr_fraction(config, step, 110) for step in (10, 35, 60, 110)] == pytest.approx(expected)


def test_a_constant_schedule_stays_at_the_full_rate():
    assert [lr_fraction(Schedule("constant"), step, 10) for step in (0, 5, 10, 1000)] == [1.0] * 4


def test_the_rate_stays_at_its_end_when_training_goes_past_it():
    assert lr_fraction(Schedule("linear", final_fraction=0.1), 1_000, 100) == pytest.approx(0.1)
    assert lr_fraction(Schedule("cosine"), 1_000, 100) == 0.0


def test_a_run_of_nothing_but_warm_up_works():
    config = Schedule("linear", warmup_steps=4)
    assert [lr_fraction(config, step, 4) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps 101 is more than the 100 steps"):
        lr_fraction(Schedule(warmup_steps=101), 0, 100)


@pytest.mark.parametrize(
    "settings",
    [
        {"decay": "square"},
        {"warmup_steps": -1},
        {"final_fraction": 1.5},
        {"final_fraction": float("nan")},
        {"decay": "constant", "final_fraction": 0.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=list(settings)[-1]):
        decode(Schedule, settings, "schedule")
