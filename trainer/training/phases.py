"""Phases: parts of one run with settings of their own, such as a sequence length.

BERT spends 90% of its steps at length 128 and the rest at 512. LAMB's 76-minute BERT also warms up
again for length 512 (You et al. 2020, section 4.1). A phase of left-to-right language modeling
before masked language modeling can beat the latter alone (Gisserot-Boukhlef et al. 2025,
arXiv 2507.00994). A run without phases is a run with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np

from samestep.config import Kinds, Tree
from samestep.errors import ConfigError
from samestep.hashing import combine, name_key
from trainer.objectives import ObjectiveConfig
from trainer.optim.schedules import Schedule, lr_fraction

_PHASE = name_key("phase")

MicroBatchSize: TypeAlias = int | Literal["auto"]

_POSITIONS = 4096  # of a micro-batch without measured memory; larger ones are no faster on a CPU


@dataclass(frozen=True)
class Config:
    """One phase. What is null is taken from `data`, `training`, `objective` and the like.

    Attributes:
        steps: optimizer steps of this phase; all phases together have `training.steps`.
        sequence_length: positions of an example.
        global_batch_size: examples of one step, over all devices.
        micro_batch_size: the most examples of one forward and backward pass on one device, or auto.
        lr: learning rate at the top of the schedule.
        schedule: the learning rate over the steps of this phase alone, warm-up included; null
            continues the run's own schedule, which covers the steps of the whole run.
        objective: what is predicted in this phase; the model must offer it.
    """

    steps: int
    sequence_length: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: MicroBatchSize | None = None
    lr: float | None = None
    schedule: Schedule | None = None
    objective: Annotated[ObjectiveConfig, Kinds("trainer.objectives.kinds")] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        check_micro_batch_size(self.micro_batch_size)
        if self.lr is not None and not 0 <= self.lr < float("inf"):
            raise ConfigError(f"lr is {self.lr}; use a number of 0 or more")


def check_micro_batch_size(size: MicroBatchSize | None) -> None:
    """Rejects a number below 1.

    Raises:
        ConfigError: names the value.
    """
    if isinstance(size, int) and size < 1:
        raise ConfigError(f"micro_batch_size must be at least 1, or auto, not {size}")


@dataclass(frozen=True)
class Phase:
    """A phase with all its settings.

    Attributes:
        index: number of the phase, from 0.
        order: number of its data order, from 0. Consecutive phases of one sequence length share
            an order: lengths 128, 128, 512 have the orders 0, 0, 1.
        first_step, end: its steps are [first_step, end).
        sequence_length, global_batch_size, micro_batch_size: as in `Config`.
        lr: as in `Config`; None is the optimizer's own.
        schedule: of the learning rate.
        schedule_start, schedule_steps: the steps that the schedule covers.
        objective: settings of what is predicted.
        fits: number of examples measured to fit into the devices' memory, at most as many as are
            needed; None if it was not measured.
    """

    index: int
    order: int
    first_step: int
    end: int
    sequence_length: int
    global_batch_size: int
    micro_batch_size: MicroBatchSize
    lr: float | None
    schedule: Schedule
    schedule_start: int
    schedule_steps: int
    objective: ObjectiveConfig
    fits: int | None = None

    def seed(self, seed: int) -> int:
        """Seed of the phase's data order, masks and dropout; the run's own in the first order."""
        # Otherwise a run without phases would change by becoming the first phase of a longer one.
        if self.order == 0:
            return seed
        return int(combine(seed, _PHASE, self.order)[0] >> np.uint64(32))

    def lr_fraction(self, step: int) -> float:
        """Factor on the learning rate for the update of `step`, counted from 0 over the run."""
        return lr_fraction(self.schedule, step - self.schedule_start, self.schedule_steps)


def phase_of(phases: tuple[Phase, ...], step: int) -> Phase:
    """Returns the phase of the update of `step`, from 0; after the run's end, the last phase."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def examples_after(phases: tuple[Phase, ...], order: int, step: int) -> int:
    """Returns the number of examples of a data order in the run's first `step` steps.

    Steps after the run's end count as steps of its last phase: the run may be continued.
    """
    # With phases of steps [0, 4) and [4, 10), batches of 10 and 20, and one order, step 6 is
    # after 4 * 10 + 2 * 20 examples.
    return sum(
        ((step if phase is phases[-1] else min(step, phase.end)) - phase.first_step)
        * phase.global_batch_size
        for phase in phases
        if phase.order == order and phase.first_step < step
    )


def resolve(
    phases: tuple[Config, ...],
    *,
    steps: int,
    sequence_length: int,
    global_batch_size: int,
    micro_batch_size: MicroBatchSize,
    schedule: Schedule,
    objective: ObjectiveConfig,
) -> tuple[Phase, ...]:
    """Fills in what the phases leave to the run.

    Raises:
        ConfigError: the phases' steps do not add up to the run's, or a warm-up is too long.
    """
    # A run without phases is one phase, so that nothing else has two cases.
    phases = phases or (Config(steps),)
    total = sum(phase.steps for phase in phases)
    if total != steps:
        raise ConfigError(
            f"the {len(phases)} phases have {total} steps together and training.steps is {steps}; "
            f"set training.steps to {total}, or change the steps of a phase"
        )
    resolved: list[Phase] = []
    order, first = 0, 0
    for index, phase in enumerate(phases):
        own, length = phase.schedule, phase.sequence_length or sequence_length
        if resolved and length != resolved[-1].sequence_length:
            order += 1  # examples of another length are packed again
        resolved.append(
            Phase(
                index=index,
                order=order,
                first_step=first,
                end=first + phase.steps,
                sequence_length=length,
                global_batch_size=phase.global_batch_size or global_batch_size,
                micro_batch_size=phase.micro_batch_size or micro_batch_size,
                lr=phase.lr,
                schedule=own or schedule,
                # The run's own schedule goes on through phases that have none: it counts all steps.
                schedule_start=first if own else 0,
                schedule_steps=phase.steps if own else steps,
                objective=phase.objective or objective,
            )
        )
        # Raises an error if the warm-up is longer than the steps of the schedule.
        try:
            resolved[-1].lr_fraction(first)
        except ConfigError as error:
            raise ConfigError(f"phases.{index}: {error}" if own else str(error)) from None
        first += phase.steps
    return tuple(resolved)


def objective_settings(config: Tree, phase: Phase) -> Tree:
    """The settings of a phase's own objective, or of the run's.

    Args:
        config: the settings of the run.
    """
    own = config["phases"][phase.index]["objective"] if config["phases"] else None
    objective: Tree = own or config["objective"]
    return objective


def without_probe(most: int, positions: int) -> int:
    """Returns a micro-batch size without measuring memory, as on the CPU and under XLA.

    Args:
        most: examples of a device in a step.
        positions: of an example.
    """
    # With 512 positions an example: 8 examples, or fewer if the step has fewer.
    return max(1, min(most, _POSITIONS // positions))
