from __future__ import annotations

import math

import pytest

from samestep.errors import ConfigError, SamestepError
from trainer.training.observers.faults import FaultCheck
from trainer.training.observers.settings import Faults as Config


def filled(sigma: float | None, values: list[float], window: int = 4) -> FaultCheck:
    faults = FaultCheck(Config(action="skip", sigma=sigma, window=window))
    for value in values:
        assert faults.check(value, value) is None
    return faults


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_fault(value: float) -> None:
    faults = FaultCheck(Config(action="skip"))
    assert faults.check(value, 1.0) == f"the loss is {value}"
    assert faults.check(1.0, value) == f"the gradient norm is {value}"
    assert faults.check(value, value) == f"the loss is {value} and the gradient norm is {value}"
    assert faults.check(1e30, 1e30) is None


def test_with_a_loss_scale_gradients_may_overflow_and_losses_may_not() -> None:
    faults = FaultCheck(Config(action="skip", sigma=3, window=2), scaled=True)
    assert [faults.check(1.0, norm) for norm in (math.inf, math.nan, 1.0, 1.0)] == [None] * 4
    assert faults.check(math.nan, 1.0) == "the loss is nan"
    assert faults.check(1.0, 2.0) is not None  # those that had overflowed are not in the window


def test_spikes_are_measured_against_a_full_window_of_sound_steps() -> None:
    values = [1.0, 2.0, 1.0, 2.0]  # mean 1.5, standard deviation 0.5
    assert filled(3, values[:3]).check(99.0, 99.0) is None
    faults = filled(3, values)
    assert faults.check(3.01, 2.99) == "the loss is 3.01, above 3"
    assert faults.check(2.99, 3.01) == "the gradient norm is 3.01, above 3"
    assert faults.check(-99.0, 1.5) is None  # lower is no fault
    assert filled(None, values).check(99.0, 99.0) is None


def test_a_new_phase_has_a_window_of_its_own() -> None:
    faults = filled(3, [1.0, 2.0, 1.0, 2.0])
    faults.clear_window()
    assert [faults.check(9.0, 9.0) for _ in range(4)] == [None] * 4
    assert faults.check(9.1, 9.0) == "the loss is 9.1, above 9"


def test_a_fault_is_no_part_of_the_window() -> None:
    faults = filled(3, [1.0, 2.0, 1.0, 2.0])
    assert [faults.check(9.0, 1.5) for _ in range(9)] == ["the loss is 9, above 3"] * 9


def test_state_continues_the_window_and_the_counts() -> None:
    first = filled(3, [1.0, 2.0, 1.0, 2.0, 2.5])
    first.skips(5, "x")
    second = FaultCheck(Config(action="skip", sigma=3, window=4))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.check(9.0, 9.0) == first.check(9.0, 9.0) is not None


def test_faults_after_the_checkpoint_that_a_rewind_goes_back_to_stay_counted() -> None:
    faults = FaultCheck(Config(action="rewind", most_per_thousand=2))
    checkpoint = faults.state_dict()
    for _ in range(2):
        assert faults.check(1.0, 1.0) is None
        faults.skips(9, "x")
        faults.load_state_dict(checkpoint)
    faults.check(1.0, 1.0)
    message = r"3 faults in 1,000 steps, the last at step 9, where x: .* \(it is 2\)"
    with pytest.raises(SamestepError, match=message):
        faults.skips(9, "x")


def test_bound_in_a_row() -> None:
    faults = FaultCheck(Config(action="skip", most_in_a_row=1, most_per_thousand=99))
    for step in range(5):
        faults.skips(step, "x")
        faults.check(1.0, 1.0)
    faults.skips(5, "x")
    with pytest.raises(SamestepError, match="2 faults in a row, the last at step 5"):
        faults.skips(5, "x")


def test_faults_long_ago_do_not_count() -> None:
    faults = FaultCheck(Config(action="skip", most_per_thousand=1))
    for step in (0, 1000, 2000):
        faults.skips(step, "x")
        faults.check(1.0, 1.0)
    with pytest.raises(SamestepError, match="2 faults in 1,000 steps"):
        faults.skips(2999, "x")


@pytest.mark.parametrize(
    "wrong",
    [{"sigma": 0.0}, {"sigma": math.nan}, {"window": 1}, {"around": -1}, {"most_in_a_row": -1}],
)
def test_wrong_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)  # type: ignore[arg-type]
