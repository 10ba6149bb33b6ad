"""Learning-rate schedules: pure functions of the step, so a resumed run needs no schedule state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from samestep.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run, as a fraction of the optimizer's `lr`.

    Attributes:
        decay: how the rate falls. linear, cosine (half a cosine), polynomial (a power of the line)
            and 1-sqrt (1 minus a square root, Hägele et al. 2024) reach `final_fraction` at the end
            of the run; inverse_sqrt falls as 1 / sqrt(step), whatever the length of the run;
            constant does not fall.
        warmup_steps: updates below the full rate.
        initial_fraction: the fraction at the first update of the warm-up.
        decay_start: the step at which the decay begins; null begins it where the warm-up ends. A
            later step keeps the full rate in between (warm-up, stable, decay). 0 counts the decay
            from the first step, as the code of BERT does: the rate drops where the warm-up ends.
        power: exponent of the polynomial decay.
        final_fraction: the fraction at the end of the run.
    """

    decay: Literal["linear", "cosine", "polynomial", "1-sqrt", "inverse_sqrt", "constant"] = (
        "linear"
    )
    warmup_steps: int = 0
    initial_fraction: float = 0.0
    decay_start: int | None = None
    power: float = 1.0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}. Use 0 or more.")
        if self.decay_start is not None and self.decay_start < 0:
            raise ConfigError(
                f"decay_start is {self.decay_start}. "
                "Use a step of at least 0, or null for the end of the warm-up."
            )
        if not 0 < self.power < math.inf:
            raise ConfigError(f"power is {self.power}. Use a finite number above 0.")
        for name in ("initial_fraction", "final_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}. Use a fraction of lr from 0 to 1.")
        if self.initial_fraction and not self.warmup_steps:
            raise ConfigError(
                f"initial_fraction is {self.initial_fraction} and there is no warm-up. "
                "Set warmup_steps."
            )
        unused = {
            "power": self.power != 1 and self.decay != "polynomial",
            "final_fraction": self.final_fraction > 0
            and self.decay in ("constant", "inverse_sqrt"),
            "decay_start": self.decay_start is not None and self.decay == "constant",
        }
        for name, is_set in unused.items():
            if is_set:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and decay {self.decay} does not use it. "
                    "Remove it."
                )
        if self.decay == "inverse_sqrt" and self._start < 1:
            raise ConfigError(
                "decay inverse_sqrt cannot begin at step 0. Set warmup_steps or decay_start."
            )

    @property
    def _start(self) -> int:
        return self.warmup_steps if self.decay_start is None else self.decay_start


def lr_fraction(config: Schedule, step: int, total_steps: int) -> float:
    """The fraction of `lr` for update number `step`, counted from 0.

    Warm-up is a line from `initial_fraction` at step 0 to 1 at step == warmup_steps, as in BERT's
    code. A decay would reach `final_fraction` at step == total_steps, one past the last. With p
    going from 0 to 1 over the decay, the rate falls as

        linear      1 - p                       (1 - p) ** power    polynomial
        cosine      (1 + cos(pi p)) / 2         1 - sqrt(p)         1-sqrt

    and inverse_sqrt is sqrt(decay_start / step): by default, the schedule of Vaswani et al. 2017
    (eq. 3); with `decay_start` k and no warm-up, the 1 / sqrt(max(step, k)) of T5 (Raffel et al.
    2020, section 3.1.2).

    Raises:
        ConfigError: the warm-up, or the time before a decay that ends with the run, is longer than
            the run.
    """
    start = config._start
    if config.warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps {config.warmup_steps} is more than the {total_steps} steps of the "
            "schedule, which never reaches the full learning rate. "
            f"Set schedule.warmup_steps to about {max(1, total_steps // 10)}."
        )
    # inverse_sqrt does not depend on the end of the run.
    if start > total_steps and config.decay != "inverse_sqrt":
        raise ConfigError(
            f"decay_start {start} is after the {total_steps} steps of the schedule. "
            f"Set schedule.decay_start to at most {total_steps}, or schedule.decay to constant."
        )
    if step < config.warmup_steps:
        progress = step / config.warmup_steps
        return config.initial_fraction + (1 - config.initial_fraction) * progress
    if config.decay == "constant":
        return 1.0
    if config.decay == "inverse_sqrt":
        return math.sqrt(start / max(start, step))
    progress = min(1.0, max(0, step - start) / max(1, total_steps - start))
    remaining = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "polynomial": math.pow(1 - progress, config.power),
        "1-sqrt": 1 - math.sqrt(progress),
    }[config.decay]
    return config.final_fraction + (1 - config.final_fraction) * remaining
