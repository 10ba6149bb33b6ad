"""Settings of observers and of faults: training.best, .retrieval, .faults, probes, profiles."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from samestep.errors import ConfigError

_MOST_STEPS = 20  # a trace takes a few megabytes for each micro-batch
DIGESTS = "digests.jsonl"
"""File of `trainer.training.observers.digests`, in the run's folder."""

Pool: TypeAlias = Literal["mean", "first"]


@dataclass(frozen=True)
class Best:
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

    def check(self, known: Collection[str]) -> None:
        """Rejects a metric that evaluations do not have.

        Raises:
            ConfigError: names the metrics that they have.
        """
        if self.metric not in known:
            raise ConfigError(
                f"training.best.metric is {self.metric}, and evaluations give {', '.join(known)}; "
                "name one of these"
            )


@dataclass(frozen=True)
class Retrieval:
    """Scores of retrieval in each evaluation: all documents of a folder are ranked for each query.

    Attributes:
        path: a folder in the layout of BEIR: corpus.jsonl, queries.jsonl, qrels/.
        split: name of a file in qrels, such as dev.
        measures: scores, such as ndcg@10; see docs/retrieval.md.
        max_length: tokens of a text, special ones included; longer texts are truncated. None is the
            number of the objective, or that the model reads.
    """

    path: str
    split: str = "test"
    measures: tuple[str, ...] = ("ndcg@10", "mrr@10", "recall@100")
    max_length: int | None = None

    def __post_init__(self) -> None:
        if "://" in self.path:
            raise ConfigError(f"path is {self.path}. Copy the folder to this machine, and name it.")
        if not self.measures:
            raise ConfigError("measures is empty. Name at least one, such as ndcg@10.")


@dataclass(frozen=True)
class Faults:
    """What to do about a step whose loss or gradient is not finite, or suddenly large.

    Attributes:
        action: stop ends the run. skip leaves the update out and takes the step with the next
            examples. rewind goes back to a checkpoint and skips the examples around the step.
        sigma: a loss or gradient norm more than this many standard deviations above the mean of
            the window is a fault as well; null accepts every finite value.
        window: number of sound steps that a spike is compared with. No spike is found in a phase
            before it has had this many.
        around: a rewind also skips the examples of this many steps before and after the fault.
        most_in_a_row: number of faults without a sound step in between; one more stops the run.
        most_per_thousand: number of faults in a thousand steps; one more stops the run.
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
        least = {"window": 2, "around": 0, "most_in_a_row": 0, "most_per_thousand": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, not {getattr(self, name)}")

    @property
    def checks_steps(self) -> bool:
        """Whether each step is checked before its update; the host then waits for the device."""
        return self.action != "stop" or self.sigma is not None


@dataclass(frozen=True)
class Probe:
    """A probe during training: a linear classifier on hidden states, scored on held-out rows.

    Attributes:
        path: folder or address of a dataset of kind classification, built with the run's tokenizer.
        every: steps between two scores; one is also computed at the last of `training.steps`.
        rows: number of rows to train the classifier on, and to score it on: a fixed sample of each
            split.
        layer: number of the layer: 0 is the embeddings, -1 the last layer.
        pool: how a text's hidden states become one vector: their mean, or the first one ([CLS]).
        sequence_length: positions of a text; longer ones are truncated.
    """

    path: str
    every: int
    rows: int = 2048
    layer: int = -1
    pool: Pool = "mean"
    sequence_length: int = 128

    def __post_init__(self) -> None:
        for name in ("every", "rows", "sequence_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use at least 1.")


@dataclass(frozen=True)
class Profile:
    """Which steps are profiled. `touch RUN/profile` profiles the next steps of a running run.

    Attributes:
        start: the first step to profile, from 1; null profiles on demand only.
        steps: number of steps, at most 20; the trace is held in memory, megabytes for each
            micro-batch.
        ranks: ranks that profile from `start`; on demand, only rank 0 does.
    """

    start: int | None = None
    steps: int = 3
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.start is not None and self.start < 1:
            raise ConfigError(
                f"start must be at least 1, or null to profile on demand only, not {self.start}"
            )
        if not 1 <= self.steps <= _MOST_STEPS:
            raise ConfigError(
                f"steps must lie in 1 .. {_MOST_STEPS}, not {self.steps}; traces grow large"
            )
