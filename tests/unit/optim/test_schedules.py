"""Learning-rate schedules at their corners."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.optim.schedules import Schedule, lr_fraction


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "polynomial", "1-sqrt", "inverse_sqrt", "constant"]
)
def test_warm_up_is_a_line_from_zero_to_the_full_rate(kind: str):
    config = decode(Schedule, {"decay": kind, "warmup_steps": 10})
    assert [lr_fraction(config, step, 100) for step in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]


def test_linear_decay_is_a_line_to_the_final_fraction():
    config = Schedule("linear", warmup_steps=10, final_fraction=0.2)
    assert [lr_fraction(config, step, 110) for step in (10, 60, 110)] == pytest.approx(
        [1.0, 0.6, 0.2]
    )
    assert lr_fraction(Schedule("linear"), 99, 100) == pytest.approx(
        0.01
    )  # the last update still moves the weights


def test_a_warm_up_and_a_linear_decay_are_slanted_triangular_rates():
    """Howard & Ruder 2018, equation 3, with the paper's cut_frac = 0.1 and ratio = 32."""
    steps, cut_frac, ratio = 200, 0.1, 32
    cut = int(steps * cut_frac)
    config = Schedule(warmup_steps=cut, initial_fraction=1 / ratio, final_fraction=1 / ratio)
    for step in range(steps):
        p = step / cut if step < cut else 1 - (step - cut) / (cut * (1 / cut_frac - 1))
        expected = (1 + p * (ratio - 1)) / ratio
        assert lr_fraction(config, step, steps) == pytest.approx(expected, rel=1e-12)


def test_cosine_decay_is_half_a_cosine():
    config = Schedule("cosine", warmup_steps=10, final_fraction=0.1)
    expected = [1.0, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1]
    assert [lr_fraction(config, step, 110) for step in (10, 35, 60, 110)] == pytest.approx(expected)


def test_polynomial_decay_is_a_power_of_the_line():
    """As in LAMB's recipes: a square root, which stays high and falls at the end."""
    config = Schedule("polynomial", warmup_steps=10, power=0.5, final_fraction=0.2)
    assert [lr_fraction(config, step, 110) for step in (10, 85, 110)] == pytest.approx(
        [1.0, 0.6, 0.2]
    )
    line = Schedule("polynomial", warmup_steps=10)
    assert all(
        lr_fraction(line, step, 30) == lr_fraction(Schedule(warmup_steps=10), step, 30)
        for step in range(31)
    )


def test_a_decay_from_step_0_drops_where_the_warm_up_ends_as_in_the_code_of_bert_and_nvidia():
    config = Schedule("polynomial", warmup_steps=2000, power=0.5, decay_start=0)
    assert lr_fraction(config, 1999, 7038) == pytest.approx(1999 / 2000)
    for step in (2000, 5000, 7037):
        assert lr_fraction(config, step, 7038) == pytest.approx((1 - step / 7038) ** 0.5)


@pytest.mark.parametrize(
    ("decay", "halfway"),
    [("linear", 0.5), ("cosine", 0.5), ("polynomial", 0.25), ("1-sqrt", 1 - 0.5**0.5)],
)
def test_warm_up_stable_decay_keeps_the_full_rate_until_its_decay_starts(
    decay: str, halfway: float
):
    power = 2.0 if decay == "polynomial" else 1.0
    config = decode(
        Schedule, {"decay": decay, "warmup_steps": 10, "decay_start": 80, "power": power}
    )
    assert [lr_fraction(config, step, 100) for step in (5, 10, 50, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert lr_fraction(config, 90, 100) == pytest.approx(halfway)
    assert lr_fraction(config, 100, 100) == pytest.approx(0.0, abs=1e-12)


def test_inverse_square_root_is_the_schedule_of_t5_and_of_the_transformer():
    t5, transformer = (
        Schedule("inverse_sqrt", decay_start=10_000),
        Schedule("inverse_sqrt", warmup_steps=4000),
    )
    for step in (0, 9_999, 10_000, 40_000, 2_000_000):
        assert 0.01 * lr_fraction(t5, step, 524_288) == pytest.approx(max(step, 10_000) ** -0.5)
    for step in (1, 1000, 4000, 99_999):
        wanted = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert 512**-0.5 * 4000**-0.5 * lr_fraction(transformer, step, 100_000) == pytest.approx(
            wanted
        )


def test_a_warm_up_from_half_the_rate_and_a_cosine_are_the_schedule_of_nanot5():
    """As `get_lr_scheduler` in nanoT5/utils/model_utils.py puts it together from torch's."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-2)
    warm_up = LinearLR(optimizer, start_factor=0.5, end_factor=1, total_iters=10)
    cosine = CosineAnnealingLR(optimizer, T_max=100 - 10, eta_min=1e-5)
    theirs = SequentialLR(optimizer, schedulers=[warm_up, cosine], milestones=[10])
    ours = Schedule("cosine", warmup_steps=10, initial_fraction=0.5, final_fraction=1e-5 / 2e-2)
    for step in range(100):
        assert 2e-2 * lr_fraction(ours, step, 100) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_a_decay_that_starts_after_the_run_is_rejected():
    with pytest.raises(ConfigError, match="decay_start 101 is after the 100 steps"):
        lr_fraction(Schedule(decay_start=101), 0, 100)


def test_a_short_run_of_t5s_schedule_keeps_the_full_rate():
    t5 = Schedule("inverse_sqrt", decay_start=10_000)
    assert [lr_fraction(t5, step, 100) for step in (0, 99)] == [1.0, 1.0]


def test_a_constant_schedule_stays_at_the_full_rate():
    assert [lr_fraction(Schedule("constant"), step, 10) for step in (0, 5, 10, 1000)] == [1.0] * 4


def test_the_rate_stays_at_its_final_value_after_the_run():
    assert lr_fraction(Schedule("linear", final_fraction=0.1), 1_000, 100) == pytest.approx(0.1)
    assert lr_fraction(Schedule("cosine"), 1_000, 100) == 0.0


def test_a_run_may_be_all_warm_up():
    config = Schedule("linear", warmup_steps=4)
    assert [lr_fraction(config, step, 4) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_warm_up_longer_than_the_run_is_rejected():
    with pytest.raises(ConfigError, match="warmup_steps 101 is more than the 100 steps"):
        lr_fraction(Schedule(warmup_steps=101), 0, 100)


@pytest.mark.parametrize(
    "settings",
    [
        {"decay": "square"},
        {"warmup_steps": -1},
        {"initial_fraction": 0.5},
        {"warmup_steps": 5, "initial_fraction": -0.1},
        {"final_fraction": 1.5},
        {"final_fraction": float("nan")},
        {"decay": "constant", "final_fraction": 0.1},
        {"decay": "inverse_sqrt", "warmup_steps": 5, "final_fraction": 0.1},
        {"decay": "constant", "decay_start": 5},
        {"decay_start": -1},
        {"decay": "inverse_sqrt", "warmup_steps": 0},
        {"decay": "inverse_sqrt", "warmup_steps": 10, "decay_start": 0},
        {"decay": "linear", "power": 2},
        {"decay": "polynomial", "power": 0},
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]):
    with pytest.raises(ConfigError, match=list(settings)[-1]):
        decode(Schedule, settings, "schedule")
