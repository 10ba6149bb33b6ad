"""A study in one file: arms that differ in some settings, and the measures to compare."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from samestep.config import Kinds, Tree, decode, read_tree, recipes
from samestep.config.tree import merge, merge_overrides
from samestep.errors import ConfigError
from trainer.monitoring import costs
from trainer.studies.stages import StageConfig

STAGES = Kinds("trainer.studies.stages")
_STAGE = Annotated[Any, STAGES]
REFERENCE = re.compile(r"stage:([\w-]+)")
"""A stage named in the settings of another: stage:pretrain, stage:corpus/tokenizer."""

_FILES = ("recipe", "experiment", "task", "probes")  # settings of stages that name a file


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number by which arms are compared.

    Attributes:
        score: stage and score, as pretrain/loss or sst2/accuracy.
        minus: another one that is subtracted: the gain over random weights, say.
        better: whether a higher or a lower number is better.
        percent: show fractions as percentages.
    """

    score: str
    minus: str | None = None
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Stage and name of the score, and of the one that is subtracted."""
        named = [self.score] if self.minus is None else [self.score, self.minus]
        return [(stage, name) for stage, _, name in (each.partition("/") for each in named)]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two arms in a measure; the page has the second's score minus the first's.

    Attributes:
        measure: name of a measure.
        arms: the two arms.
    """

    measure: str
    arms: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Primary(Comparison):
    """The comparison that the study was made for, stated before it is run.

    Attributes:
        pilot_deviation: standard deviation of the paired difference over seeds, found in a pilot
            or assumed.
        detects: smallest difference that is found in 80 of 100 such studies with the file's number
            of seeds. The page computes it for the seeds that were run.
    """

    pilot_deviation: float
    detects: float


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A plot of evaluations during training.

    Attributes:
        stage: the stage of the runs to show.
        metric: of metrics.jsonl.
        against: the horizontal axis.
    """

    stage: str
    metric: str = "heldout/loss"
    against: Literal["step", "tokens", "flops"] = "step"


@dataclass(frozen=True, kw_only=True)
class Relation:
    """A plot of one measure against another, with a point for each arm.

    Attributes:
        measure: the vertical axis.
        against: the horizontal axis.
        logarithmic: whether the horizontal axis is.
    """

    measure: str
    against: str
    logarithmic: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """A study.

    Attributes:
        question: that the study answers.
        figure: numbers of a paper or lecture to compare with, and their figure or table.
        scale: size of the models and of the data. `{scale}` in the name of a stage's file is
            replaced by it.
        seeds: number of repetitions.
        first_seed: seed of the first repetition; the others have the next ones. A pilot has other
            seeds than its study.
        stages: the steps of every arm, in this order; see `trainer.studies.stages`. A stage may use
            those before it.
        arms: settings of stages that differ in this arm, by the arm's name.
        scales: settings of the study that differ at a scale, by its name.
        baseline: the arm that the others are compared with; null is the first.
        measures: the scores to compare, by name.
        primary: the main comparison; null for a study that only explores.
        comparisons: further pairs of arms to compare.
        calibrate: for arms that are equal: cut the repetitions into studies of this many seeds, and
            count how often the interval of the primary comparison excludes zero; null does not.
        curves: plots of runs.
        relations: plots of one measure against another.
        cpu_hours: hours of one core for the whole study; shown by --list.
        costs: how energy and CO2 are estimated.
    """

    question: str
    figure: str
    scale: str
    seeds: int
    stages: dict[str, Tree]
    arms: dict[str, Tree]
    measures: dict[str, Measure]
    scales: dict[str, Tree] = field(default_factory=dict)
    first_seed: int = 0
    baseline: str | None = None
    primary: Primary | None = None
    comparisons: tuple[Comparison, ...] = ()
    calibrate: int | None = None
    curves: tuple[Curves, ...] = ()
    relations: tuple[Relation, ...] = ()
    cpu_hours: float = 0.0
    costs: costs.Config = field(default_factory=costs.Config)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}. Use at least 1.")
        if self.first_seed < 0:
            raise ConfigError(f"first_seed is {self.first_seed}. Use at least 0.")
        for name in ("stages", "arms", "measures"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty. Name at least one.")
        _among(self.baseline or self.first, self.arms, "baseline")
        for name, measure in self.measures.items():
            for setting, (stage, score) in zip(("score", "minus"), measure.parts, strict=False):
                _among(stage, self.stages, f"measures.{name}.{setting}")
                if not score:
                    raise ConfigError(
                        f"measures.{name}.{setting} is {stage!r}. Write the stage and the score, "
                        f"as {stage}/loss."
                    )
        # All names are checked before any job runs, which may take hours.
        for number, curves in enumerate(self.curves):
            _among(curves.stage, self.stages, f"curves.{number}.stage")
        for number, relation in enumerate(self.relations):
            for name in ("measure", "against"):
                _among(getattr(relation, name), self.measures, f"relations.{number}.{name}")
        for arm, changes in self.arms.items():
            for stage in changes:
                _among(stage, self.stages, f"arms.{arm}")
        if self.primary is not None:
            self._check_comparison(self.primary, "primary")
        for number, comparison in enumerate(self.comparisons):
            self._check_comparison(comparison, f"comparisons.{number}")
        if self.calibrate is not None:
            if self.primary is None:
                raise ConfigError(
                    f"calibrate is {self.calibrate}, and primary, the comparison, is not set. Set "
                    "it, or remove calibrate."
                )
            if not 2 <= self.calibrate <= self.seeds:
                raise ConfigError(
                    f"calibrate is {self.calibrate}. Use at least 2 and at most {self.seeds}, the "
                    "number of seeds."
                )

    def _check_comparison(self, comparison: Comparison, setting: str) -> None:
        _among(comparison.measure, self.measures, f"{setting}.measure")
        if len(comparison.arms) != 2:
            raise ConfigError(f"{setting}.arms names {len(comparison.arms)} arms. Name two.")
        if comparison.arms[0] == comparison.arms[1]:
            raise ConfigError(f"{setting}.arms names one arm twice. Name two.")
        for arm in comparison.arms:
            _among(arm, self.arms, f"{setting}.arms")

    @property
    def repetitions(self) -> range:
        """The seeds of the repetitions."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def first(self) -> str:
        """The first arm."""
        return next(iter(self.arms))


def _among(name: str, known: Mapping[str, object], setting: str) -> None:
    if name not in known:
        raise ConfigError(f"{setting} is {name!r}. Use one of {', '.join(known)}.")


@dataclass(frozen=True)
class Study:
    """A study and the file that it comes from.

    Attributes:
        name: of its file.
        config: its content.
        folder: that the names of files in it are relative to.
    """

    name: str
    config: Config
    folder: Path

    @classmethod
    def read(cls, file: str, overrides: Sequence[str] = ()) -> Study:
        """Reads a study.

        Args:
            file: path, or the name of a recipe.
            overrides: settings that replace the file's, as seeds=1.

        Raises:
            ConfigError: the file does not describe a study.
        """
        path = recipes.locate(file)
        tree = read_tree(path, overrides)
        at_scale = (tree.get("scales") or {}).get(tree.get("scale")) or {}
        # Overrides again: they win over the settings of a scale as well.
        tree = merge_overrides(merge(tree, at_scale), overrides)
        return cls(path.stem, decode(Config, tree), path.parent)

    @property
    def baseline(self) -> str:
        return self.config.baseline or self.config.first

    def stages_of(self, arm: str) -> dict[str, StageConfig]:
        """Returns the stages of an arm, in order, without those that it sets to null."""
        trees = merge(self.config.stages, self.config.arms[arm])
        stages: dict[str, StageConfig] = {}
        for name, tree in trees.items():
            if tree is not None:
                stages[name] = decode(_STAGE, self._located(tree), f"stages.{name}")
                # With 3 seeds, an offset of 1 gives seed 0 here the run of seed 1 elsewhere.
                if 0 < (offset := stages[name].seed_offset) < self.config.seeds:
                    raise ConfigError(
                        f"stages.{name}.seed_offset is {offset} in the arm {arm!r}, so repetitions "
                        f"would share runs. Use at least {self.config.seeds}, the number of seeds."
                    )
        return stages

    def _located(self, tree: Tree) -> Tree:
        """A stage with the paths of its files."""
        files = {
            key: str(recipes.locate(value.replace("{scale}", self.config.scale), self.folder))
            for key, value in tree.items()
            if key in _FILES and isinstance(value, str)
        }
        return tree | files
