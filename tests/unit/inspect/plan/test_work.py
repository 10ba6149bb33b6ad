"""What a whole run takes: FLOPs of all phases, hours and energy."""

from __future__ import annotations

import json

import pytest

from samestep.config import load
from tests.integration.commands import Samestep
from trainer.inspect.plan.device import Device
from trainer.inspect.plan.work import flops, work
from trainer.monitoring.costs import Config
from trainer.training.experiment import Experiment


def test_flops_are_those_of_all_phases(experiment_file: str) -> None:
    def of(*settings: str) -> float:
        return flops(load(Experiment, experiment_file, ["schedule.warmup_steps=0", *settings]))

    one = of("training.steps=10")
    assert of("training.steps=30") == pytest.approx(3 * one)
    assert of("training.steps=10", "training.global_batch_size=4") == pytest.approx(
        one * 4 / load(Experiment, experiment_file).training.global_batch_size
    )
    halves = "phases=[{steps: 5, global_batch_size: 4}, {steps: 5, global_batch_size: 12}]"
    assert of("training.steps=10", halves) == pytest.approx(
        of("training.steps=10", "training.global_batch_size=8")
    )


def test_time_and_energy_follow_from_the_assumptions(experiment_file: str) -> None:
    experiment = load(Experiment, experiment_file)
    device = Device(tflops=1e-6, utilization=0.5, watts=500)
    needed = work(experiment, 2, device, Config(grams_per_kwh=400, overhead=1.2))
    assert needed.hours == pytest.approx(flops(experiment) / (2 * 1e6 * 0.5) / 3600)
    assert needed.kwh == pytest.approx(needed.hours * 2 * 0.5 * 1.2)
    assert needed.kilograms == pytest.approx(needed.kwh * 0.4)


@pytest.mark.long
def test_the_command_prints_it(experiment_file: str, samestep: Samestep) -> None:
    plan = ("plan", experiment_file, "--devices", "2", "--strategy", "ddp")
    device = ("--tflops", "0.001", "--utilization", "0.25", "--watts", "50")
    assert "With 2 devices at 25% of 0.001 TFLOP/s and 50 W each:" in " ".join(
        samestep(*plan, *device).out.split()
    )
    tree = json.loads(samestep(*plan, *device, "--json").out)
    assert tree["work"]["flops"] == pytest.approx(flops(load(Experiment, experiment_file)))
    for option, value, message in (
        ("--tflops", "0", "--tflops is 0.0. Use a number above 0"),
        ("--utilization", "1.5", "Use at most 1, the whole peak"),
    ):
        assert message in samestep(*plan, option, value).message
