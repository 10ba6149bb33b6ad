"""The work of a run in FLOPs, and what is measured to forecast its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch

from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from samestep.config import kind_name
from trainer.models import Model
from trainer.monitoring.forecast import Schedule, TimeLeft
from trainer.monitoring.performance import Throughput
from trainer.objectives import Objective
from trainer.partition import whole_shape
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer
from trainer.training.passes import evaluation_batches
from trainer.training.phases import Phase

logger = logging.getLogger(__name__)


def flops_until(experiment: Experiment, trainer: Trainer) -> Callable[[int], float]:
    """Returns a function from a step to the model FLOPs of all steps before it, on all devices.

    With `data.group_by_length` it is an upper bound: batches are as wide as their longest row.
    """
    with torch.device("meta"):
        # Whole, whatever the strategy has partitioned: FLOPs are of all devices together.
        model = experiment.build_model()

    per_step = [
        flops_of_step(model, trainer.objectives[phase.index], phase) for phase in trainer.phases
    ]
    return _until(trainer, per_step)


def flops_of_step(model: Model, objective: Objective, phase: Phase) -> float:
    """Returns the model FLOPs of a step of a phase, on all devices."""
    length = phase.sequence_length
    spec = objective.pack_spec(length)
    # The choices of a row (multiple choice) are sequences of their own; see `PackSpec.parts`.
    positions = length if spec.parts is None else spec.positions
    per_token = model.flops_per_token(length, objective.predictions(length) / positions)
    return per_token * positions * phase.global_batch_size


def _until(trainer: Trainer, per_step: Sequence[float]) -> Callable[[int], float]:
    """Returns a function from a step to the sum over all steps before it.

    Args:
        per_step: the value of a step, for each phase.
    """
    phases = list(zip(trainer.phases, per_step, strict=True))
    return lambda step: sum(
        each * (min(step, phase.end) - phase.first_step)
        for phase, each in phases
        if step > phase.first_step
    )


def throughput(experiment: Experiment, trainer: Trainer) -> Throughput:
    """Measures the throughput of the run from now on."""
    peak = trainer.strategy.accelerator.peak_flops(experiment.training.precision)
    # Grouped batches are narrower than the phase's length, by an amount known only afterwards. So
    # Throughput scales the FLOPs by the positions that were really computed.
    positions_until = None
    if experiment.data.group_by_length is not None:
        positions = [
            phase.global_batch_size * objective.pack_spec(phase.sequence_length).positions
            for phase, objective in zip(trainer.phases, trainer.objectives, strict=True)
        ]
        positions_until = _until(trainer, positions)
    flops = flops_until(experiment, trainer)
    return Throughput(
        trainer.state.step,
        flops_until=flops,
        peak_flops=peak * trainer.strategy.replica.count if peak else None,
        positions_until=positions_until,
        time_left=TimeLeft(trainer.state.step, _schedule(experiment, trainer, flops)),
    )


def _schedule(experiment: Experiment, trainer: Trainer, flops: Callable[[int], float]) -> Schedule:
    settings, checkpoint, batches = experiment.training, experiment.checkpoint, 0
    if settings.evaluate_every is not None:
        heldout, phase = trainer.loaders.heldout(trainer.phase), trainer.phase
        most = settings.evaluate_batches
        batches = evaluation_batches(heldout, phase.global_batch_size, most)
        heldout.close()
    return Schedule(
        settings.steps,
        # By FLOPs, not steps: later phases of a run may have longer sequences.
        work_until=flops,
        evaluate_every=settings.evaluate_every,
        evaluation_batches=batches,
        save_every=[each for each in (checkpoint.every, checkpoint.snapshot_every) if each],
    )


def report(experiment: Experiment, dataset: AnyDataset, trainer: Trainer) -> None:
    """Logs, before the first step, what is about to run."""
    settings, accelerator = experiment.training, trainer.strategy.accelerator
    devices, first = trainer.strategy.replica.count, trainer.state.step
    kind = kind_name(experiment.strategy)
    device = f"{devices} x {accelerator.description}, strategy {kind}"
    logger.info("device       %s, %s", device, settings.precision)
    if accelerator.attention_kernels:
        logger.info("attention    %s", accelerator.attention_kernels)
    _report_parameters(trainer)
    _report_sources(experiment, dataset)
    for phase in trainer.phases:
        _report_batch(trainer, phase)
    done = flops_until(experiment, trainer)
    flops = done(settings.steps) - done(first)
    # No time is given: how fast these devices are is known only after the first steps.
    most = " at most" if experiment.data.group_by_length is not None else ""
    steps = f"steps {first + 1} to {settings.steps}"
    logger.info("work         %s, %.3g FLOPs%s", steps, flops, most)
    logger.info("output       %s", experiment.output)


def _report_parameters(trainer: Trainer) -> None:
    total = trained = 0
    for parameter in trainer.strategy.parameters.values():
        size = math.prod(whole_shape(parameter))
        total += size
        trained += size if parameter.requires_grad else 0
    share = ""
    if trained < total:
        share = f", {trained:,} of them trained ({trained / total:.2%})"
    logger.info("model        %s parameters%s", f"{total:,}", share)


def _report_sources(experiment: Experiment, dataset: AnyDataset) -> None:
    """Logs the weights of a mixture's sources, and the steps at which they change.

    Weights that count sizes are logged as fractions of the examples.
    """
    data = experiment.data
    if not data.sources:
        return

    def listed(rates: dict[str, float]) -> str:
        total = 1.0 if data.proportional is None else sum(rates.values())
        return ", ".join(f"{name} {rate / total:.6g}" for name, rate in rates.items())

    (_, first), *changes = data.rates(named_sources(dataset))
    text = listed(first)
    for step, rates in changes:
        text += f"; after step {step} {listed(rates)}"
    logger.info("data         %s", text)


def _report_batch(trainer: Trainer, phase: Phase) -> None:
    spec = trainer.objectives[phase.index].pack_spec(phase.sequence_length)
    size: object = spec.positions
    if spec.sides is not None and not spec.sides.joined:
        size = "({} + {})".format(*spec.sides.size)
    name, steps = f"phase {phase.index}", f", steps {phase.first_step + 1} to {phase.end}"
    if len(trainer.phases) == 1:
        name, steps = "batch", ""
    logger.info(
        "%-12s %d examples x %s = %s tokens a step, in micro-batches of at most %d%s",
        name,
        phase.global_batch_size,
        size,
        f"{phase.global_batch_size * spec.positions:,}",
        phase.micro_batch_size,
        steps,
    )
