"""Kinds of stages of a study: each becomes jobs that run samestep commands.

A stage's settings may name another stage: `stage:pretrain` stands for the folder that this stage
makes (a dataset, a run), in the same arm and with the same seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.config import Tree
from samestep.errors import ConfigError, DataError
from samestep.stored_json import Measure, checked, damage_of, read_json


@dataclass(frozen=True, kw_only=True)
class StageConfig(ABC):
    """A stage.

    Attributes:
        seed: of all jobs of this stage; null takes the repetition's seed.
        seed_offset: added to the study's seed: an arm that differs in random numbers alone, or a
            second run in each repetition.
    """

    seed: int | None = None
    seed_offset: int = 0

    random: ClassVar[bool] = True
    """Whether the result depends on the seed itself, and not only on the stages that it uses."""
    product: ClassVar[str]
    """What other stages use of this one: a file or folder in a job's folder."""

    def __post_init__(self) -> None:
        if self.seed_offset and self.seed is not None:
            raise ConfigError("seed and seed_offset exclude each other. Leave one out.")
        if self.seed_offset < 0:
            raise ConfigError(f"seed_offset is {self.seed_offset}. Use at least 0.")
        if self.seed_offset and not self.random:
            raise ConfigError(
                f"seed_offset is {self.seed_offset}, but this stage uses no random numbers. "
                "Remove it."
            )

    def seed_of(self, repetition: int) -> int:
        """The seed of the job's commands, from the seed of the repetition."""
        return repetition + self.seed_offset if self.seed is None else self.seed

    @abstractmethod
    def resolved(self) -> Tree:
        """Everything that the result depends on, except the seed and the stages that are named."""

    def check(self, settings: Tree) -> None:  # noqa: B027
        """Checks settings before any job is run.

        Args:
            settings: `resolved`, with folders in place of stages.

        Raises:
            ConfigError: a setting is invalid.
        """

    def inputs(self, resolved: Tree) -> Sequence[object]:
        """Hashes that change with the content of the files that the stage reads."""
        return ()

    @abstractmethod
    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        """Writes the files that the commands read, and returns the arguments of each.

        Args:
            folder: of the job, which may have files of an attempt that was stopped.
            settings: `resolved`, with folders in place of stages.
        """

    @abstractmethod
    def scores(self, folder: Path) -> Mapping[str, float]:
        """Returns the scores of a finished job by name.

        Raises:
            SamestepError: there are none.
        """

    def finish(self, folder: Path) -> None:  # noqa: B027
        """Completes `product` after the commands of a job have succeeded."""

    def predictions(self, folder: Path) -> Path | None:
        """The file with a line for each held-out row; None without one."""
        return None


class ScoringConfig(StageConfig):
    """A stage that scores checkpoints. Its command writes the scores to a file."""

    random = False
    product = "scores.json"

    def scores(self, folder: Path) -> Mapping[str, float]:
        file = folder / self.product
        with damage_of(file, DataError, "Remove it to score again."):
            found = read_json(file, dict[str, object])
            found.pop("per_class", None)  # which no study compares
            return checked(found, dict[str, Measure])
