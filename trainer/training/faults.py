"""Numerical faults: which steps look wrong, and when there are too many of them.

A step's loss or gradient that is not finite ruins the weights; one far above those before it, a spike, may set a run
back for thousands of steps. OLMo leaves out updates 6 sigma above a running window (Groeneveld et al. 2024); PaLM went
back to a checkpoint and passed over the batches around a spike (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from trainer.errors import ConfigError, SamestepError

_PER = 1000


@dataclass(frozen=True)
class Config:
    """What to do about a step whose loss or gradient is not finite, or suddenly large.

    Attributes:
        action: stop ends the run; skip leaves the update out and takes the step with the examples that follow; rewind
            goes back to a checkpoint and passes over the examples around the step.
        sigma: a loss or gradient norm more than this many standard deviations above the mean of the window is a fault,
            too; null takes only what is not finite for one.
        window: sound steps that a spike is compared with; before there are so many in a phase, none is found.
        around: steps before the faulty one, and after it, whose examples a rewind passes over as well.
        most_in_a_row: faults without a sound step between them; one more stops the run.
        most_per_thousand: faults in a thousand steps; one more stops the run.
    """

    action: Literal["stop", "skip", "rewind"] = "stop"
    sigma: float | None = None
    window: int = 128
    around: int = 10
    most_in_a_row: int = 3
    most_per_thousand: int = 10

    def __post_init__(self) -> None:
        if self.sigma is not None and not 0 < self.sigma < math.inf:
            raise ConfigError(
                f"sigma must be above 0, such as 6, or null for no limit, not {self.sigma}"
            )
        for name, least in (
            ("window", 2),
            ("around", 0),
            ("most_in_a_row", 0),
            ("most_per_thousand", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def looks(self) -> bool:
        """Whether each step is looked at before its update, for which the host waits for the device."""
        return self.action != "stop" or self.sigma is not None


class FaultsState(TypedDict):
    """What a checkpoint keeps: numbers of sound steps, the faulty steps, and how many in a row."""

    sound: dict[str, list[float]]
    steps: list[int]
    in_a_row: int


class Faults:
    """Tells faulty steps from sound ones. It decides on numbers of the host alone, so that all ranks decide alike.

    Args:
        config: what is a fault.
        scaled: whether the loss is scaled, for fp16: gradients that are not finite are the business of the scale then.
    """

    def __init__(self, config: Config, scaled: bool = False) -> None:
        self._config, self._scaled = config, scaled
        self._sound = {
            name: deque[float](maxlen=config.window) for name in ("loss", "gradient norm")
        }
        self._steps: list[int] = []
        self._in_a_row = 0

    def look(self, loss: float, grad_norm: float) -> str | None:
        """Says what is wrong with a step of which these are the numbers; takes note of a sound one, with None."""
        wrong = []
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                if not (self._scaled and name == "gradient norm"):
                    wrong.append(f"the {name} is {value}")
            elif (limit := self._limit(self._sound[name])) < value:
                wrong.append(f"the {name} is {value:.4g}, above {limit:.4g}")
        if not wrong:
            self._passed(loss, grad_norm)
        return " and ".join(wrong) or None

    def _limit(self, window: deque[float]) -> float:
        if self._config.sigma is None or len(window) < self._config.window:
            return math.inf
        return float(np.mean(window) + self._config.sigma * np.std(window))

    def _passed(self, loss: float, grad_norm: float) -> None:
        self._in_a_row = 0
        if self._config.sigma is not None:
            for window, value in zip(self._sound.values(), (loss, grad_norm), strict=True):
                if math.isfinite(value):
                    window.append(value)

    def forget(self) -> None:
        """Empties the window: the steps that follow are of another kind."""
        for window in self._sound.values():
            window.clear()

    def count(self, step: int, fault: str) -> None:
        """Takes note of a faulty step.

        Raises:
            SamestepError: there are too many.
        """
        self._in_a_row += 1
        self._steps = [each for each in self._steps if abs(step - each) < _PER] + [step]
        for number, most, which, setting in (
            (self._in_a_row, self._config.most_in_a_row, "in a row", "most_in_a_row"),
            (
                len(self._steps),
                self._config.most_per_thousand,
                f"in {_PER:,} steps",
                "most_per_thousand",
            ),
        ):
            if number > most:
                raise SamestepError(
                    f"{number} faults {which}, the last at step {step}, where {fault}: it is not single examples that "
                    f"are at fault; lower optimizer.lr, or raise training.faults.{setting} (it is {most}), and run the "
                    "same command again"
                )

    def state_dict(self) -> FaultsState:
        """What a checkpoint keeps."""
        return {
            "sound": {n: list(w) for n, w in self._sound.items()},
            "steps": self._steps,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: FaultsState) -> None:
        """Goes on from a checkpoint. Faults after it stay counted, so that a run does not rewind for ever."""
        self.forget()
        for name, window in self._sound.items():
            window.extend(state["sound"][name])
        if not self._steps:
            self._steps, self._in_a_row = list(state["steps"]), state["in_a_row"]
