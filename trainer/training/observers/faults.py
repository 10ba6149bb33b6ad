"""Numerical faults: finds steps with a bad loss or gradient and decides what to do about them.

A loss or gradient that is not finite ruins the weights. A spike, a value far above the recent ones,
can set a run back by thousands of steps. OLMo skips updates 6 standard deviations above a
running mean (Groeneveld et al. 2024). PaLM went back to a checkpoint and skipped the batches around
a spike (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from samestep.errors import SamestepError
from trainer.training.observers.settings import Faults
from trainer.training.state import Meta

_PER = 1000
_NAMES = ("loss", "gradient norm")


class FaultCheck:
    """Finds faulty steps, and decides whether the run skips them, rewinds or stops.

    It only sees numbers that are equal on all ranks, so all ranks decide alike.

    Args:
        config: what counts as a fault.
        scaled: whether the loss is scaled (fp16). Gradients may overflow then: the loss scale
            skips such updates itself.
        output: the run's folder, for messages.

    Attributes:
        checks_steps: whether each step is checked before its update.
    """

    def __init__(self, config: Faults, scaled: bool = False, output: str = "") -> None:
        self._config, self._scaled, self._output = config, scaled, output
        self.checks_steps = config.checks_steps
        self._sound = {name: deque[float](maxlen=config.window) for name in _NAMES}
        self._steps: list[int] = []
        self._in_a_row = 0

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Describes the fault of a step; for a sound step adds it to the window, returns None."""
        values = dict(zip(_NAMES, (loss, grad_norm), strict=True))
        # A faulty step does not enter the window: a series of spikes would raise the limit until
        # they pass.
        wrong = []
        for name, value in values.items():
            limit = self._limit(self._sound[name])
            if math.isfinite(value):
                if value > limit:
                    wrong.append(f"the {name} is {value:.4g}, above {limit:.4g}")
            elif not (self._scaled and name == "gradient norm"):
                wrong.append(f"the {name} is {value}")
        if wrong:
            return " and ".join(wrong)
        self._in_a_row = 0
        for name, value in values.items():
            if self._config.sigma is not None and math.isfinite(value):
                self._sound[name].append(value)
        return None

    def _limit(self, window: deque[float]) -> float:
        if self._config.sigma is None or len(window) < self._config.window:
            return math.inf
        return float(np.mean(window) + self._config.sigma * np.std(window))

    def clear_window(self) -> None:
        """Forgets the steps of a phase: the losses of other lengths or batch sizes differ."""
        for window in self._sound.values():
            window.clear()

    def skips(self, step: int, fault: str) -> bool:
        """Counts a faulty step. Returns whether to skip it; otherwise the run must rewind.

        Raises:
            SamestepError: the run has to stop, by its settings or because of too many faults.
        """
        if self._config.action == "stop":
            raise SamestepError(
                f"step {step} was not taken: {fault}, also when recomputed. {self._advice(step)}"
            )
        self._in_a_row += 1
        # abs: after a rewind, the steps counted last may come after this one.
        self._steps = [each for each in self._steps if abs(step - each) < _PER] + [step]
        in_a_row, per_thousand = self._config.most_in_a_row, self._config.most_per_thousand
        for number, most, which, setting in (
            (self._in_a_row, in_a_row, "in a row", "most_in_a_row"),
            (len(self._steps), per_thousand, f"in {_PER:,} steps", "most_per_thousand"),
        ):
            if number > most:
                raise SamestepError(
                    f"{number} faults {which}, the last at step {step}, where {fault}: single "
                    "examples are not the cause. Lower optimizer.lr, or raise "
                    f"training.faults.{setting} (it is {most}), and run the same command again"
                )
        return self._config.action == "skip"

    def require_finite(self, step: int, values: Mapping[str, float], grad_norm: float) -> None:
        """Stops the run before valid checkpoints are replaced by useless ones.

        Args:
            step: that was taken last.
            values: means or sums of metrics since the last row, reduced over all ranks, so that all
                of them raise together.
            grad_norm: of the step.

        Raises:
            SamestepError: a value is not finite.
        """
        fix = "set training.precision=bf16 or fp32, as fp16 overflows in the forward pass,"
        # With a loss scale, steps with an overflowed gradient are skipped: they are no error.
        if not self._scaled:
            values = {**values, "grad_norm": grad_norm}
            fix = "lower optimizer.lr or training.max_grad_norm"
        for name, value in values.items():
            if not math.isfinite(value):
                raise SamestepError(
                    f"train/{name} is {value} at step {step}, so further training would be lost. "
                    f"The checkpoints before it are valid: {fix} and run the same command again. "
                    f"{self._advice(step)}"
                )

    def _advice(self, step: int) -> str:
        """What a user can do about a fault that has stopped the run."""
        return (
            f"Its examples, by loss: samestep replay {self._output} {step}; to continue "
            "without them, set training.faults.action to skip or rewind"
        )

    def state_dict(self) -> Meta:
        """State for a checkpoint."""
        sound = {name: list(window) for name, window in self._sound.items()}
        return {"sound": sound, "steps": self._steps, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Meta) -> None:
        """Restores the window; faults after the checkpoint stay counted.

        Otherwise a run that rewinds to the same checkpoint again and again would never stop.
        """
        self.clear_window()
        for name, window in self._sound.items():
            window.extend(state["sound"][name])
        # Empty at the start of the process. After a rewind it has the faults since the checkpoint.
        if not self._steps:
            self._steps, self._in_a_row = list(state["steps"]), state["in_a_row"]
