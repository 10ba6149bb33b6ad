"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over a run, as a fraction of the optimizer's `lr`.

    Attributes:
        decay: what follows the warm-up: a straight line or half a cosine down to `final_fraction`, or no change.
        warmup_steps: updates made below the full rate; the first is made with a rate of 0.
        final_fraction: the fraction that the rate has come down to when the run is over.
    """

    decay: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; use 0 or more")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"final_fraction is {self.final_fraction}; use a fraction of lr from 0 to 1")
        if self.decay == "constant" and self.final_fraction:
            raise ConfigError(f"final_fraction {self.final_fraction} means nothing to a constant schedule; remove it")


def lr_fraction(config: Schedule, step: int, total_steps: int) -> float:
    """The fraction of `lr` with which the update number `step`, counted from 0, is made.

    Warm-up is `step / warmup_steps`, as in BERT's code: 0 at step 0, 1 at step == warmup_steps. From there the decay
    covers the remaining `total_steps - warmup_steps` updates and would reach `final_fraction` at step == total_steps,
    one past the last. (BERT's code instead counts its decay from step 0, so that its rate drops when warm-up ends.)

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    if config.warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps {config.warmup_steps} is more than the {total_steps} steps of the run; the full learning "
            f"rate would never be used; set schedule.warmup_steps to about {total_steps // 10}"
        )
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    remaining = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * remaining
