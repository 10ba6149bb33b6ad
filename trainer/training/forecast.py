"""What a run is about to do: its work in FLOPs and how long that may take."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from trainer.monitoring.throughput import Throughput
from trainer.partition import whole_shape
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer

logger = logging.getLogger(__name__)


def flops_until(experiment: Experiment, trainer: Trainer) -> Callable[[int], float]:
    """A function from a step to the model FLOPs of all steps before it, over all devices.

    With `data.group_by_length` these are the most: batches are no wider than their longest row.
    """
    with torch.device("meta"):
        model = experiment.build_model()

    def flops_per_step(length: int, examples: int) -> float:
        spec = trainer.objective.pack_spec(length)
        cells = length if spec.parts is None else spec.positions
        each: float = (
            model.flops_per_token(length, trainer.objective.predictions(length) / cells) * cells
        )
        return each * examples

    return _until(
        trainer,
        [
            flops_per_step(phase.sequence_length, phase.global_batch_size)
            for phase in trainer.phases
        ],
    )


def _until(trainer: Trainer, per_step: Sequence[float]) -> Callable[[int], float]:
    """A function from a step to the sum over all steps before it of what a step of each phase has."""
    phases = list(zip(trainer.phases, per_step, strict=True))
    return lambda step: sum(
        each * (min(step, phase.end) - phase.first_step)
        for phase, each in phases
        if step > phase.first_step
    )


def throughput(experiment: Experiment, trainer: Trainer) -> Throughput:
    """Measures the speed of the run from now on."""
    peak = trainer.strategy.accelerator.peak_flops(experiment.training.precision)
    spec = trainer.objective.pack_spec
    cells = [
        phase.global_batch_size * spec(phase.sequence_length).positions for phase in trainer.phases
    ]
    return Throughput(
        trainer.state.step,
        experiment.training.steps,
        flops_until=flops_until(experiment, trainer),
        peak_flops=peak * trainer.strategy.replica.count if peak else None,
        cells_until=None if experiment.data.group_by_length is None else _until(trainer, cells),
    )


def report(experiment: Experiment, trainer: Trainer) -> None:
    """Says before the first step what is about to run, how much work it is and how long it may take."""
    settings, count = experiment.training, trainer.strategy.replica.count
    accelerator = trainer.strategy.accelerator
    sizes = [
        (math.prod(whole_shape(each)), each.requires_grad)
        for each in trainer.strategy.parameters.values()
    ]
    parameters, trained = (
        sum(size for size, _ in sizes),
        sum(size for size, is_trained in sizes if is_trained),
    )
    of_them = (
        ""
        if trained == parameters
        else f", {trained:,} of them trained ({trained / parameters:.2%})"
    )
    done = flops_until(experiment, trainer)
    flops = done(settings.steps) - done(trainer.state.step)
    speed = accelerator.expected_flops(settings.precision)
    narrower = experiment.data.group_by_length is not None
    estimate = (
        f", {timedelta(seconds=round(flops / speed / count))} or more"
        if speed and not narrower
        else ""
    )
    kind = type(experiment.strategy).__module__.rpartition(".")[2]
    logger.info(
        "device       %d x %s, strategy %s, %s",
        count,
        accelerator.description,
        kind,
        settings.precision,
    )
    logger.info("model        %s parameters%s", f"{parameters:,}", of_them)
    if experiment.data.sources:
        shares = [{source.label: source.weight for source in experiment.data.sources}]
        shares += [change.weights for change in experiment.data.weights]
        said = [", ".join(f"{name} {weight:g}" for name, weight in each.items()) for each in shares]
        later = [
            f"; after step {change.step} {then}"
            for change, then in zip(experiment.data.weights, said[1:], strict=True)
        ]
        logger.info("data         %s%s", said[0], "".join(later))
    for phase in trainer.phases:
        spec = trainer.objective.pack_spec(phase.sequence_length)
        sides = None if spec.sides is None or spec.sides.joined else spec.sides.size
        logger.info(
            "%-12s %d examples x %s = %s tokens a step, in micro-batches of at most %d%s",
            "batch" if len(trainer.phases) == 1 else f"phase {phase.index}",
            phase.global_batch_size,
            spec.positions if sides is None else f"({sides[0]} + {sides[1]})",
            f"{phase.global_batch_size * spec.positions:,}",
            phase.micro_batch_size,
            "" if len(trainer.phases) == 1 else f", steps {phase.first_step + 1} to {phase.end}",
        )
    most = " at most" if narrower else ""
    steps = f"steps {trainer.state.step + 1} to {settings.steps}"
    logger.info("work         %s, %.3g FLOPs%s%s", steps, flops, most, estimate)
    logger.info("output       %s", experiment.output)
