"""The best checkpoint of a run, by a score of its evaluations, and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Which checkpoint is the best. It is kept beside the newest ones, and RUN/best names it.

    Scores of different objectives or sequence lengths cannot be compared, so the comparison starts
    over at the first evaluation after either changes.

    Attributes:
        metric: a score of the evaluations of all phases, by its name in metrics.jsonl without
            `heldout/`, such as accuracy or loss.
        mode: whether the highest value is best (max) or the lowest (min). None means min for a
            metric whose name ends in loss, perplexity or mse, else max.
        patience: the run ends after this many evaluations in a row without a better one; None
            trains to the last step.
    """

    metric: str
    mode: Literal["max", "min"] | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.metric.startswith("heldout/"):
            raise ConfigError(f"metric is {self.metric}; leave heldout/ out")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(
                "patience must be at least 1, or null to train to the last step, "
                f"not {self.patience}"
            )

    @property
    def lowest(self) -> bool:
        """Whether lower is better."""
        if self.mode is None:
            return self.metric.endswith(("loss", "perplexity", "mse"))
        return self.mode == "min"


class Best:
    """The best evaluation so far; the same on all ranks.

    Args:
        config: the criterion; None if the run has no best checkpoint.
    """

    def __init__(self, config: Config | None) -> None:
        self._config = config
        # (step, score, what it is of) of every evaluation that was the best of its time, the newest
        # last: when the checkpoint of the best step cannot be saved, the one before is the best
        # again.
        self._history: list[tuple[int, float, object]] = []
        self._since = 0
        # `scored` of the last evaluation, see `update`.
        self._scored: object = None

    @property
    def step(self) -> int | None:
        """Step of the best evaluation; None before the first finite score."""
        return self._history[-1][0] if self._history else None

    @property
    def value(self) -> float:
        """Score of the best evaluation; NaN before the first."""
        return self._history[-1][1] if self._history else math.nan

    def update(
        self,
        step: int,
        scores: Mapping[str, float],
        all_reduce: Callable[[Tensor], Tensor],
        scored: object = None,
    ) -> None:
        """Compares a new evaluation with the best one.

        Scores may differ between ranks in the last bit. If any rank finds the new one better, it
        counts as better on all of them: they must save and stop at the same steps.

        Args:
            all_reduce: sums a tensor over all ranks.
            scored: what the scores are of, as JSON. Only scores with an equal one are compared.

        Raises:
            ConfigError: the metric is not among the scores.
        """
        if self._config is None or not scores:  # none if nothing was predicted
            return
        check_metric(self._config, scores)
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
        if all_reduce(torch.tensor([int(better)])).item():
            self._history.append((step, value, scored))
            self._since = 0
        else:
            self._since += 1

    def discard(self, step: int | None) -> None:
        """Removes a step whose checkpoint could not be saved."""
        self._history = [best for best in self._history if best[0] != step]

    @property
    def out_of_patience(self) -> bool:
        """Whether the run must end, for lack of a better evaluation."""
        patience = None if self._config is None else self._config.patience
        return patience is not None and self._since >= patience

    def __str__(self) -> str:
        if self._config is None or self.step is None:
            return "no evaluation has a finite score"
        return f"heldout/{self._config.metric} is best at step {self.step}: {self.value:.6g}"

    def state_dict(self) -> Meta:
        """State for a checkpoint; empty if the run has no best checkpoint."""
        if self._config is None:
            return {}
        return {
            "best": {
                "metric": self._config.metric,
                "lowest": self._config.lowest,
                "step": self.step,
                "value": None if self.step is None else self.value,
                "of": self._history[-1][2] if self._history else None,
                "since": self._since,
                "scored": self._scored,
            }
        }

    def load_state_dict(self, meta: Meta, holds: Callable[[int], bool]) -> None:
        """Restores the state of a checkpoint; starts anew if that state cannot be used.

        It cannot if the criterion has changed, or if the best checkpoint is gone.

        Args:
            holds: whether the checkpoint of a step exists. One that was being saved during a
                crash does not.
        """
        self._history, self._since, self._scored = [], 0, None
        state, config = meta.get("best"), self._config
        if state is None or config is None:
            return
        if (state["metric"], state["lowest"]) != (config.metric, config.lowest):
            return
        step, of = state["step"], state.get("of", state.get("scored"))
        if step is None or holds(step):
            self._since, self._scored = state["since"], state.get("scored")
            self._history = [] if step is None else [(step, state["value"], of)]
        else:
            logger.info(
                "the best checkpoint, of step %d, is gone; the next evaluation counts as best", step
            )


def check_metric(config: Config, known: Collection[str]) -> None:
    """Rejects a metric that evaluations do not have.

    Raises:
        ConfigError: names the metrics that they have.
    """
    if config.metric not in known:
        raise ConfigError(
            f"training.best.metric is {config.metric}, and evaluations give {', '.join(known)}; "
            "name one of these"
        )
