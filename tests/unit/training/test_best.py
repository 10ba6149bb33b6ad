"""Which evaluation is the best, and when a run has waited long enough for a better one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from samestep.errors import ConfigError
from trainer.training.observers.best import BestEvaluation
from trainer.training.observers.settings import Best as Config


def followed(config: Config, values: Sequence[float]) -> BestEvaluation:
    best = BestEvaluation(config)
    for step, value in enumerate(values, 1):
        best.evaluated(10 * step, {config.metric: value})
    return best


@pytest.mark.parametrize(
    ("config", "values", "step", "over"),
    [
        (Config("accuracy", patience=2), [0.5, 0.7, 0.7, 0.6], 20, True),
        (Config("accuracy", patience=2), [0.5, 0.4, 0.6, 0.6], 30, False),
        (Config("accuracy"), [0.5, 0.4, 0.3, 0.2], 10, False),
        (Config("loss", patience=2), [3, 2, 4, 5], 20, True),
        (Config("error", mode="min", patience=1), [3, 2], 20, False),
        (Config("accuracy", patience=2), [math.nan, 0.1], 20, False),
        (Config("accuracy", patience=2), [math.nan, math.nan], None, True),
    ],
)
def test_best_and_patience(
    config: Config, values: list[float], step: int | None, over: bool
) -> None:
    best = followed(config, values)
    assert (best.best_step, best.ends_run) == (step, over)
    for cut in range(len(values)):  # wherever a checkpoint was, going on from it comes to the same
        before, after = followed(config, values[:cut]), BestEvaluation(config)
        after.load_state_dict(before.state_dict())
        for number, value in enumerate(values[cut:], cut + 1):
            after.evaluated(10 * number, {config.metric: value})
        assert (after.best_step, after.ends_run) == (step, over)


@pytest.mark.parametrize("cut", [None, 1, 2, 3])
def test_what_cannot_be_compared_begins_anew(cut: int | None) -> None:
    """Losses of 128 positions, then of 512, which are higher."""
    best = BestEvaluation(Config("loss", patience=2))
    for number, (length, loss) in enumerate([(128, 2.0), (128, 2.1), (512, 3.0), (512, 2.9)]):
        if number == cut:
            stored, best = best.state_dict(), BestEvaluation(Config("loss", patience=2))
            best.load_state_dict(stored)
        best.evaluated(10 * number, {"loss": loss}, [length, {"kind": "mlm"}])
        assert not best.ends_run
        assert best.best_step == (0 if length == 128 else 10 * number)
    best.before_save(0, 30)
    assert best.best_step == 20  # the one before in the same phase


def test_the_best_of_a_phase_stays_until_another_is_saved() -> None:
    best = BestEvaluation(Config("loss"))
    best.evaluated(10, {"loss": 2.0}, [128])
    best.evaluated(20, {"loss": math.nan}, [512])
    assert best.best_step == 10
    best.evaluated(30, {"loss": 3.0}, [512])
    assert best.best_step == 30
    best.before_save(0, 30)  # its checkpoint could not be saved
    assert best.best_step == 10
    best.evaluated(40, {"loss": 3.1}, [512])
    assert best.best_step == 40


@pytest.mark.parametrize("names", [["of", "scored"], ["of"]])
def test_states_of_earlier_versions(names: list[str]) -> None:
    best = BestEvaluation(Config("loss", patience=3))
    for step, value in ((10, 3), (20, 2), (30, 4)):
        best.evaluated(step, {"loss": value}, [128])
    stored = best.state_dict()
    for name in names:
        del stored["best"][name]
    after = BestEvaluation(Config("loss", patience=3))
    after.load_state_dict(stored)
    after.evaluated(40, {"loss": 2.5}, [128])
    assert (after.best_step, after.value) == (20, 2)
    after.evaluated(50, {"loss": 2.5}, [128])
    assert after.ends_run
    after.evaluated(60, {"loss": 2.5}, [512])
    assert not after.ends_run
    assert (after.best_step == 60) == (names == ["of"])


def test_a_best_that_could_not_be_saved_gives_way_to_the_one_before() -> None:
    best = followed(Config("accuracy"), [0.5, 0.6, 0.7, 0.6])
    best.before_save(0, None)
    assert best.best_step == 30
    best.before_save(0, 20)  # which the next one has followed before that was known
    best.before_save(0, 30)
    assert (best.best_step, best.value) == (10, 0.5)
    best.evaluated(50, {"accuracy": 0.6})
    assert best.best_step == 50


def test_a_rank_that_finds_it_better_decides_for_all() -> None:
    best = BestEvaluation(Config("accuracy", patience=1), all_reduce=lambda tensor: tensor + 1)
    best.evaluated(10, {"accuracy": 0.5})
    best.evaluated(20, {"accuracy": 0.5})
    assert (best.best_step, best.ends_run) == (20, False)


def test_state_of_another_metric_or_of_a_checkpoint_that_is_gone_is_forgotten() -> None:
    state = followed(Config("accuracy", patience=1), [0.5, 0.4]).state_dict()
    for config, there in (
        (Config("f1", patience=1), True),
        (Config("accuracy", patience=1), False),
    ):
        best = BestEvaluation(config, holds=lambda step, there=there: there)  # type: ignore[misc]
        best.load_state_dict(state)
        assert (best.best_step, best.ends_run) == (None, False)


def test_an_unknown_metric_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="metric is bleu, and evaluations give accuracy"):
        BestEvaluation(Config("bleu")).evaluated(1, {"accuracy": 0.5})
