"""Keeps faulty steps from a run: each is computed again, and if that does not help the run goes on without it."""

from __future__ import annotations

import logging

from trainer.errors import SamestepError
from trainer.strategies import Strategy
from trainer.training.faults import Config, Faults, FaultsState
from trainer.training.passes import Gradients, step_numbers
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


class Guard:
    """Looks at each step before its update, if it is to. All ranks come to the same findings.

    Args:
        config: what is a fault, and what is to be done about one.
        strategy: that of the model.
        output: the run's folder, for messages.
    """

    def __init__(self, config: Config, strategy: Strategy, output: str) -> None:
        self._config, self._strategy, self._output = config, strategy, output
        self._faults = Faults(config, scaled=strategy.loss_scale is not None)

    def look(self, step: int, gradients: Gradients) -> str | None:
        """Checks a step's loss and gradient norm; returns what is wrong with them, or None."""
        fault = self._faults.look(*self._numbers(gradients))
        if fault is not None:
            self._warn("step %d: %s; it is computed again from the same batch", step, fault)
        return fault

    def look_again(self, step: int, gradients: Gradients) -> str | None:
        """Checks the second result from the same batch; a fault that is gone was the hardware's."""
        loss, grad_norm = self._numbers(gradients)
        fault = self._faults.look(loss, grad_norm)
        if fault is None:
            self._warn(
                "step %d: now the loss is %.6g and the gradient norm %.6g: a passing fault",
                *(step, loss, grad_norm),
            )
        return fault

    def _numbers(self, gradients: Gradients) -> tuple[float, float]:
        with self._strategy.accelerator.graph("loss and norm"):
            return step_numbers(gradients, self._strategy)

    def skips(self, step: int, fault: str) -> bool:
        """Whether the step with a fault is to be skipped; if not, the run is to go back to a checkpoint.

        Raises:
            SamestepError: it is to stop, or this is one fault too many.
        """
        if self._config.action == "stop":
            raise SamestepError(
                f"step {step} was not taken: {fault}, twice over. {self.advice(step)}"
            )
        self._faults.count(step, fault)
        return self._config.action == "skip"

    def end_phase(self) -> None:
        """Forgets the steps of a phase, with which those of the next cannot be compared."""
        self._faults.forget()

    def advice(self, step: int) -> str:
        """What to do about a fault that has stopped the run."""
        return (
            f"Its examples, by loss: samestep replay {self._output} {step}; to go on without them, set "
            "training.faults.action to skip or rewind"
        )

    def state_dict(self) -> dict[str, FaultsState]:
        """What a checkpoint keeps: nothing, if steps are not looked at."""
        return {"faults": self._faults.state_dict()} if self._config.looks else {}

    def load_state_dict(self, state: Meta) -> None:
        """Goes on from what a checkpoint has kept, if it has."""
        if "faults" in state:
            self._faults.load_state_dict(state["faults"])

    def _warn(self, message: str, *values: object) -> None:
        if self._strategy.world.rank == 0:
            logger.warning(message, *values)
