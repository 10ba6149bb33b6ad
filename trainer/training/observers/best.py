"""The best checkpoint of a run, by a score of its evaluations, and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainer.training.observers import Observer
from trainer.training.observers.settings import Best
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


class BestEvaluation(Observer):
    """The best evaluation so far; the same on all ranks.

    Args:
        config: the criterion.
        all_reduce: sums a tensor over all ranks.
        holds: whether the checkpoint of a step exists. One that was being saved during a crash
            does not.
    """

    def __init__(
        self,
        config: Best,
        all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        holds: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._config, self._all_reduce, self._holds = config, all_reduce, holds
        # (step, score, what it is of) of every evaluation that was the best of its time, the newest
        # last: when the checkpoint of the best step cannot be saved, the one before is the best
        # again.
        self._history: list[tuple[int, float, object]] = []
        self._since = 0
        # `scored` of the last evaluation, see `evaluated`.
        self._scored: object = None

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation; None before the first finite score."""
        return self._history[-1][0] if self._history else None

    @property
    def value(self) -> float:
        """Score of the best evaluation; NaN before the first."""
        return self._history[-1][1] if self._history else math.nan

    def evaluated(self, step: int, scores: Mapping[str, float], scored: object = None) -> None:
        """Compares a new evaluation with the best one.

        Scores may differ between ranks in the last bit. If any rank finds the new one better, it
        counts as better on all of them: they must save and stop at the same steps.

        Args:
            scored: objective and length of the evaluation, as JSON. Only equal ones are compared.

        Raises:
            ConfigError: the metric is not among the scores.
        """
        if not scores:  # none if nothing was predicted
            return
        self._config.check(scores)
        if scored != self._scored and self._scored is not None:
            logger.info("another objective or sequence length; %s so far", self)
            self._since = 0
        self._scored = scored
        value = scores[self._config.metric]
        gain = self.value - value if self._config.lowest else value - self.value
        # An equal score does not count: the earlier checkpoint stays the best. The first finite
        # score always does.
        is_first = not self._history or self._history[-1][2] not in (None, scored)
        better = math.isfinite(value) and (is_first or gain > 0)
        if self._all_reduce(torch.tensor([int(better)])).item():
            self._history.append((step, value, scored))
            self._since = 0
        else:
            self._since += 1

    def before_save(self, step: int, failed: int | None) -> None:
        """Forgets a step whose checkpoint could not be saved."""
        self._history = [best for best in self._history if best[0] != failed]

    @property
    def ends_run(self) -> bool:
        """Whether the run has lost its patience: no evaluation was better for too long."""
        patience = self._config.patience
        return patience is not None and self._since >= patience

    def __str__(self) -> str:
        if self.best_step is None:
            return "no evaluation has a finite score"
        return f"heldout/{self._config.metric} is best at step {self.best_step}: {self.value:.6g}"

    def state_dict(self) -> Meta:
        """State for a checkpoint."""
        return {
            "best": {
                "metric": self._config.metric,
                "lowest": self._config.lowest,
                "step": self.best_step,
                "value": None if self.best_step is None else self.value,
                "of": self._history[-1][2] if self._history else None,
                "since": self._since,
                "scored": self._scored,
            }
        }

    def load_state_dict(self, meta: Meta) -> None:
        """Restores the state of a checkpoint; starts anew if that state cannot be used.

        It cannot if the criterion has changed, or if the best checkpoint is gone.
        """
        self._history, self._since, self._scored = [], 0, None
        state, config = meta.get("best"), self._config
        if state is None or (state["metric"], state["lowest"]) != (
            config.metric,
            config.lowest,
        ):
            return
        step, of = state["step"], state.get("of", state.get("scored"))
        if step is None or self._holds(step):
            self._since, self._scored = state["since"], state.get("scored")
            self._history = [] if step is None else [(step, state["value"], of)]
        else:
            logger.info(
                "the best checkpoint, of step %d, is gone; the next evaluation counts as best", step
            )
