"""Keeps faulty steps from a run: each is computed again, and if that does not help the run goes on without it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from trainer.errors import SamestepError
from trainer.strategies import Strategy
from trainer.training.faults import Config, Faults
from trainer.training.passes import Metrics, step_numbers

logger = logging.getLogger(__name__)

Gradients: TypeAlias = tuple[list[Metrics], Tensor]
"""The metrics of a step's micro-batches and the norm of its gradient, which has been computed."""


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

    def examine(self, step: int, compute: Callable[[], Gradients]) -> tuple[Gradients, str | None]:
        """Has the gradients of a step computed; once more if they look faulty, as hardware has passing faults.

        Returns:
            The gradients, and what was wrong with them both times; None where nothing is.
        """
        gradients = compute()
        if not self._config.looks or (fault := self._faults.look(*self._numbers(gradients))) is None:
            return gradients, None
        self._warn("step %d: %s; it is computed again from the same batch", step, fault)
        gradients = compute()
        loss, grad_norm = self._numbers(gradients)
        if (fault := self._faults.look(loss, grad_norm)) is None:
            self._warn(
                "step %d: now the loss is %.6g and the gradient norm %.6g: a passing fault", step, loss, grad_norm
            )
        return gradients, fault

    def _numbers(self, gradients: Gradients) -> tuple[float, float]:
        with self._strategy.accelerator.graph("loss and norm"):
            return step_numbers(*gradients, self._strategy)

    def skips(self, step: int, fault: str) -> bool:
        """Whether the step with a fault is to be skipped; if not, the run is to go back to a checkpoint.

        Raises:
            SamestepError: it is to stop, or this is one fault too many.
        """
        if self._config.action == "stop":
            raise SamestepError(f"step {step} was not taken: {fault}, twice over. {self.advice(step)}")
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

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing, if steps are not looked at."""
        return {"faults": self._faults.state_dict()} if self._config.looks else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint has kept, if it has."""
        if "faults" in state:
            self._faults.load_state_dict(state["faults"])

    def _warn(self, message: str, *values: object) -> None:
        if self._strategy.world.rank == 0:
            logger.warning(message, *values)
