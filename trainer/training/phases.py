"""Phases: stretches of one run with a sequence length, a batch size or a learning rate of their own.

BERT spends nine tenths of its steps at length 128 and the last tenth at 512; LAMB's 76-minute BERT warms up anew when
it goes to 512 (You et al. 2020, section 4.1). A run without phases is a run with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from trainer.errors import ConfigError
from trainer.hashing import combine, name_key
from trainer.optim.schedules import Schedule, lr_fraction

_PHASE = name_key("phase")

MicroBatchSize: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True)
class Config:
    """One phase; what is null is as in the sections `data`, `training`, `optimizer` and `schedule`.

    Attributes:
        steps: optimizer steps of this phase; those of all phases add up to `training.steps`.
        sequence_length: cells of an example.
        global_batch_size: examples of one step, over all devices.
        micro_batch_size: the most examples of one forward and backward pass on one device, or auto.
        lr: learning rate at the top of the schedule.
        schedule: the learning rate over the steps of this phase alone, warm-up included; null lets the run's own
            schedule go on over the steps of the whole run.
    """

    steps: int
    sequence_length: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: MicroBatchSize | None = None
    lr: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size < 1:
            raise ConfigError(
                f"micro_batch_size must be at least 1, or auto, not {self.micro_batch_size}"
            )
        if self.lr is not None and not 0 <= self.lr < float("inf"):
            raise ConfigError(f"lr is {self.lr}; use a number of 0 or more")


@dataclass(frozen=True)
class Phase:
    """A phase with all its settings.

    Attributes:
        index: its number, from 0.
        order: the number of its data order, from 0: phases of one sequence length that follow each other share one.
        first_step, end: its steps are first_step up to, without, end.
        sequence_length, global_batch_size, micro_batch_size: as in `Config`.
        lr: as in `Config`; None is the optimizer's own.
        schedule: of the learning rate.
        schedule_start, schedule_steps: the steps that the schedule is over.
        fits: the examples that were measured to fit into the devices' memory, up to what is needed; None where that
            was not measured.
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
    fits: int | None = None

    def seed(self, seed: int) -> int:
        """The seed of the phase's data order, masks and dropout; that of the run in its first order."""
        return (
            seed if self.order == 0 else int(combine(seed, _PHASE, self.order)[0] >> np.uint64(32))
        )

    def lr_fraction(self, step: int) -> float:
        """The fraction of the learning rate with which the update number `step` of the run, from 0, is made."""
        return lr_fraction(self.schedule, step - self.schedule_start, self.schedule_steps)


def phase_of(phases: tuple[Phase, ...], step: int) -> Phase:
    """The phase that the update number `step`, from 0, belongs to; after the end of the run, the last one."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def examples_after(phases: tuple[Phase, ...], order: int, step: int) -> int:
    """How many examples of a data order the run takes in its first `step` steps."""
    return sum(
        (min(step, phase.end) - phase.first_step) * phase.global_batch_size
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
) -> tuple[Phase, ...]:
    """Fills in what the phases leave to the run.

    Raises:
        ConfigError: the phases' steps do not add up to the run's, or a warm-up is longer than what it is a part of.
    """
    phases = phases or (Config(steps),)
    total = sum(phase.steps for phase in phases)
    if total != steps:
        raise ConfigError(
            f"the {len(phases)} phases have {total} steps together and training.steps is {steps}; set training.steps "
            f"to {total}, or change the steps of a phase"
        )
    resolved: list[Phase] = []
    for index, phase in enumerate(phases):
        first = resolved[-1].end if resolved else 0
        own, length = phase.schedule, phase.sequence_length or sequence_length
        resolved.append(
            Phase(
                index=index,
                order=resolved[-1].order + (length != resolved[-1].sequence_length)
                if resolved
                else 0,
                first_step=first,
                end=first + phase.steps,
                sequence_length=length,
                global_batch_size=phase.global_batch_size or global_batch_size,
                micro_batch_size=phase.micro_batch_size or micro_batch_size,
                lr=phase.lr,
                schedule=own or schedule,
                schedule_start=first if own else 0,
                schedule_steps=phase.steps if own else steps,
            )
        )
    for each, given in zip(resolved, phases, strict=True):
        try:
            each.lr_fraction(each.first_step)
        except ConfigError as error:
            raise ConfigError(
                f"phases.{each.index}: {error}" if given.schedule else str(error)
            ) from None
    return tuple(resolved)
