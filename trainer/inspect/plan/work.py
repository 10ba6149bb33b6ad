"""How much a whole run computes, and its time and energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.inspect.plan.batch import stand_in
from trainer.inspect.plan.device import Device
from trainer.monitoring import costs
from trainer.training.experiment import Experiment
from trainer.training.forecast import flops_of_step


@dataclass(frozen=True)
class Work:
    """The costs of a run.

    Attributes:
        flops: of all steps, as the model counts them.
        hours: on all devices together; evaluations, checkpoints and starts are not included.
        kwh: of the devices, with the building's overhead.
        kilograms: of CO2.
    """

    flops: float
    hours: float
    kwh: float
    kilograms: float


def flops(experiment: Experiment) -> float:
    """Returns the FLOPs of all steps of a run."""
    # FLOPs follow from shapes, so the model needs no memory.
    with torch.device("meta"):
        model = experiment.build_model()
    vocabulary = stand_in(experiment.model.vocab_size)
    return sum(
        flops_of_step(model, phase.objective.build(vocabulary), phase)
        * (phase.end - phase.first_step)
        for phase in experiment.resolved_phases()
    )


def work(experiment: Experiment, devices: int, device: Device, settings: costs.Config) -> Work:
    """Estimates the costs of a run on a number of devices."""
    of_run = flops(experiment)
    seconds = of_run / (devices * device.tflops * 1e12 * device.utilization)
    # Energy of all devices: watts are joules per second.
    used = costs.Usage(device_joules=seconds * devices * device.watts)
    return Work(of_run, seconds / 3600, settings.kwh(used), settings.grams(used) / 1000)
