"""The best checkpoint of a run, by a score of its evaluations, and when a run ends for want of a better one."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Which checkpoint is the best: it is kept beside the newest ones, and RUN/best names it.

    Attributes:
        metric: of the evaluations, under its name in metrics.jsonl without `heldout/`, as accuracy or loss.
        mode: whether the highest is best (max) or the lowest (min); None takes the lowest of a metric whose name ends
            in loss, perplexity or mse.
        patience: the run ends after so many evaluations in a row without a better one; None trains to the last step.
    """

    metric: str
    mode: Literal["max", "min"] | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.metric.startswith("heldout/"):
            raise ConfigError(f"metric is {self.metric}; leave heldout/ out")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(
                f"patience must be at least 1, or null to train to the last step, not {self.patience}"
            )

    @property
    def lowest(self) -> bool:
        """Whether less is better."""
        return (
            self.metric.endswith(("loss", "perplexity", "mse"))
            if self.mode is None
            else self.mode == "min"
        )


class BestState(TypedDict):
    """What a checkpoint keeps: the criterion, the best step and score, the evaluations since."""

    metric: str
    lowest: bool
    step: int | None
    value: float | None
    since: int


class Best:
    """The best evaluation so far; the same on all ranks.

    Attributes:
        step: after which it was; None before the first.
        value: its score.
        since: evaluations since then.

    Args:
        config: what is best; None if nothing is to be.
    """

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._bests: list[
            tuple[int, float]
        ] = []  # the step and score of each that was the best, the newest last
        self.since = 0

    @property
    def step(self) -> int | None:
        return self._bests[-1][0] if self._bests else None

    @property
    def value(self) -> float:
        return self._bests[-1][1] if self._bests else math.nan

    def look(
        self, step: int, scores: Mapping[str, float], all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Takes in an evaluation.

        Args:
            step: after which it was.
            scores: what came out, by name.
            all_reduce: sums a tensor over all ranks, of which any that finds it better decides for all.

        Raises:
            ConfigError: the metric is none of the scores.
        """
        if self._config is None:
            return
        check_metric(self._config, scores)
        value = scores[self._config.metric]
        gain = self.value - value if self._config.lowest else value - self.value
        better = math.isfinite(value) and (self.step is None or gain > 0)
        if all_reduce(torch.tensor([int(better)])).item():
            self._bests.append((step, value))
            self.since = 0
        else:
            self.since += 1

    def not_saved(self, step: int | None) -> None:
        """Forgets that this step was the best, as its checkpoint could not be saved: the one before is again."""
        self._bests = [best for best in self._bests if best[0] != step]

    @property
    def over(self) -> bool:
        """Whether the run is to end."""
        return (
            self._config is not None
            and self._config.patience is not None
            and self.since >= self._config.patience
        )

    def __str__(self) -> str:
        if self._config is None or self.step is None:
            return "no evaluation has a finite score"
        return f"heldout/{self._config.metric} is best at step {self.step}: {self.value:.6g}"

    def state_dict(self) -> dict[str, BestState]:
        """What a checkpoint keeps: nothing, if no step is to be best."""
        if self._config is None:
            return {}
        state: BestState = {
            "metric": self._config.metric,
            "lowest": self._config.lowest,
            "step": self.step,
            "value": None if self.step is None else self.value,
            "since": self.since,
        }
        return {"best": state}

    def load_state_dict(self, state: Meta, holds: Callable[[int], bool]) -> None:
        """Goes on from what a checkpoint has kept; where that is of no use, the next evaluation is the first one.

        Args:
            state: of the checkpoint.
            holds: whether the checkpoint of a step is there, as one that was being saved in a crash is not.
        """
        own, best = self.state_dict().get("best"), state.get("best", {})
        self._bests, self.since = [], 0
        if own is None or (best.get("metric"), best.get("lowest")) != (
            own["metric"],
            own["lowest"],
        ):
            return
        if best["step"] is None:
            self.since = best["since"]
        elif holds(best["step"]):
            self._bests, self.since = [(best["step"], best["value"])], best["since"]
        else:
            logger.info(
                "the best checkpoint, of step %d, is gone; the next evaluation counts as best",
                best["step"],
            )


def check_metric(config: Config, known: Collection[str]) -> None:
    """Refuses a metric that evaluations do not give.

    Raises:
        ConfigError: naming those that they do.
    """
    if config.metric not in known:
        raise ConfigError(
            f"training.best.metric is {config.metric}, and evaluations give {', '.join(known)}; name one of these"
        )
