"""Phases: which steps belong to which, and what each takes from the run."""

from __future__ import annotations

import pytest

from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import ConfigError
from trainer.models.families import bert
from trainer.objectives.kinds import causal_lm, mlm
from trainer.optim.kinds import adamw
from trainer.optim.schedules import Schedule
from trainer.training.experiment import Experiment
from trainer.training.phases import Config, Phase, examples_after, phase_of, resolve
from trainer.training.settings import Config as TrainingConfig

RUN = {
    "sequence_length": 128,
    "global_batch_size": 64,
    "schedule": Schedule("linear", 10),
    "objective": mlm.Config(),
}


def _resolve(*phases: Config, steps: int = 100) -> tuple[Phase, ...]:
    return resolve(phases, steps=steps, micro_batch_size="auto", **RUN)


def test_without_phases_a_run_is_one() -> None:
    (phase,) = _resolve()
    assert (phase.first_step, phase.end, phase.sequence_length, phase.global_batch_size) == (
        0,
        100,
        128,
        64,
    )
    assert phase.seed(7) == 7


def test_a_phase_overrides_what_it_names_and_takes_the_rest_from_the_run() -> None:
    first, second = _resolve(
        Config(90),
        Config(10, sequence_length=512, global_batch_size=16, micro_batch_size=2, lr=3.0),
    )
    assert (first.sequence_length, first.global_batch_size, first.micro_batch_size, first.lr) == (
        128,
        64,
        "auto",
        None,
    )
    assert (
        second.sequence_length,
        second.global_batch_size,
        second.micro_batch_size,
        second.lr,
    ) == (512, 16, 2, 3.0)
    assert (second.first_step, second.end) == (90, 100)


def test_every_step_belongs_to_one_phase() -> None:
    phases = _resolve(Config(1), Config(98), Config(1))
    assert [phase_of(phases, step).index for step in (0, 1, 98, 99, 100)] == [0, 1, 1, 2, 2]


def test_examples_are_counted_within_their_data_order() -> None:
    phases = _resolve(
        Config(10),
        Config(20, global_batch_size=3),
        Config(70, sequence_length=512, global_batch_size=5),
    )
    assert [examples_after(phases, 0, step) for step in (0, 4, 10, 11, 30, 90)] == [
        0,
        256,
        640,
        643,
        700,
        700,
    ]
    assert [examples_after(phases, 1, step) for step in (0, 30, 31, 100)] == [0, 0, 5, 350]


def test_a_phase_may_have_its_own_objective() -> None:
    causal = causal_lm.Config()
    phases = _resolve(Config(10, objective=causal), Config(90))
    assert [phase.objective for phase in phases] == [causal, mlm.Config()]
    # The second continues the data order of the first.
    assert [phase.order for phase in phases] == [0, 0]


def test_the_run_s_schedule_goes_on_through_phases_without_their_own() -> None:
    phases = _resolve(Config(90), Config(10, sequence_length=512))
    (whole,) = _resolve()
    assert [phase_of(phases, step).lr_fraction(step) for step in range(100)] == list(
        map(whole.lr_fraction, range(100))
    )


def test_a_schedule_of_a_phase_is_over_its_own_steps() -> None:
    second = _resolve(Config(80), Config(20, schedule=Schedule("linear", 10)))[1]
    assert [second.lr_fraction(step) for step in (80, 85, 90, 95)] == pytest.approx(
        [0, 0.5, 1, 0.5]
    )


def test_a_change_of_the_length_begins_an_order_and_no_other_change_does() -> None:
    lengths = (None, 128, 512, 512, 128)
    phases = _resolve(
        *(Config(20, sequence_length=length, lr=lr) for lr, length in enumerate(lengths))
    )
    assert [phase.order for phase in phases] == [0, 0, 1, 1, 2]
    seeds = [phase.seed(7) for phase in phases]
    assert seeds[0] == seeds[1] == 7
    assert seeds[2] == seeds[3]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("phases", "complaint"),
    [
        (
            [Config(90), Config(20)],
            "110 steps together and training.steps is 100; set training.steps to 110",
        ),
        (
            [Config(95), Config(5, schedule=Schedule("linear", 6))],
            "^phases.1: warmup_steps 6 is more than the 5 steps",
        ),
    ],
)
def test_phases_that_contradict_the_run_are_rejected(phases: list[Config], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _resolve(*phases)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"sequence_length": 0}, {"micro_batch_size": 0}, {"lr": -1.0}]
)
def test_invalid_values_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**{"steps": 1, **wrong})


def test_every_batch_holds_whole_groups_of_data_group_by_source() -> None:
    def experiment(group: int, *phases: Config) -> Experiment:
        data = DataConfig(path="data", group_by_source=group)
        training = TrainingConfig(steps=10, global_batch_size=96)
        parts = (bert.Config(), mlm.Config(), data, training, adamw.Config(lr=1e-3))
        return Experiment("run", *parts, phases=phases)

    for group in (1, 32, 48, 96):
        experiment(group)
    with pytest.raises(
        ConfigError, match=r"size 96\. Set .* to 96 or .*, or the batch size to 128"
    ):
        experiment(64)
    with pytest.raises(ConfigError, match=r"size 96\. .* batch size to 192"):
        experiment(192)
    with pytest.raises(ConfigError, match=r"is 32, and does not .*size 16 of phase 1\. .* to 32"):
        experiment(32, Config(5), Config(5, global_batch_size=16))
