"""A fine-tuning task in one file.

Its rows, what is predicted of them, and how BERT was fine-tuned on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import trainer
from data_pipeline.building.recipe import TaskData
from data_pipeline.sources import SourceConfig
from trainer.config import Kinds, Tree, decode, read_tree
from trainer.config.tree import merge
from trainer.errors import ConfigError
from trainer.generation.config import Config as GenerationConfig
from trainer.metrics.texts import METRICS

_FOLDER = Path("configs", "tasks")
_RECIPE = ("epochs", "warmup", "grid", "experiment")
_SOURCE = Annotated[SourceConfig, Kinds("data_pipeline.sources")]


@dataclass(frozen=True, kw_only=True)
class Config(TaskData):
    """A task: its rows, and how models are fine-tuned and scored on them.

    Attributes:
        objective: what is predicted.
        score: the metric of the objective that runs are compared by.
        epochs: passes over the rows to train on.
        warmup: share of the steps in which the learning rate rises.
        sequence_length: positions of an example.
        metrics: of `samestep evaluate --metrics`, where answers are texts, which finished runs
            generate.
        grid: settings of the experiment to try, each with its values; the first of each is taken
            unless all are asked for.
        evaluations: how many a run has, evenly spread; of several, its scores are those of the best
            one.
        patience: a run ends after so many of them in a row without a better one; null trains to the
            last step.
        start: another task of the suite: the runs of this one start from its best run, as those of
            RTE from MNLI's (Phang et al. 2018); null: from the suite's checkpoint.
        published: scores of others, by name of the metric, to compare with; NAME/METRIC is of the
            further set NAME.
        published_by: who they are of.
    """

    objective: Annotated[Any, Kinds("trainer.objectives")]
    score: str
    epochs: float = 3.0
    warmup: float = 0.1
    sequence_length: int = 128
    metrics: tuple[str, ...] = ()
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: int = 1
    patience: int | None = None
    start: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    published_by: str = "BERT-base (Devlin et al. 2019)"

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise ConfigError(f"epochs is {self.epochs}; use a number above 0, as 3")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup is a share of the steps in [0, 1), not {self.warmup}")
        if self.evaluations < 1:
            raise ConfigError(f"evaluations must be at least 1, not {self.evaluations}")
        if self.patience is not None and not 1 <= self.patience < self.evaluations:
            raise ConfigError(
                f"patience is {self.patience} of {self.evaluations} evaluations; use 1 or more, "
                "and fewer than these"
            )
        if self.metrics and not self.objective.task.writes_text:
            raise ConfigError(
                f"metrics has {', '.join(self.metrics)}, of texts that are written, as with the "
                "objective seq2seq; "
                "name them in objective.metrics instead"
            )
        if self.objective.task.writes_text and not self.metrics:
            raise ConfigError(
                "seq2seq writes texts; name what they are scored by in metrics, as accuracy"
            )
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ConfigError(
                f"metrics has {unknown[0]!r}, which is none of texts; use {', '.join(METRICS)}"
            )
        if self.metrics and self.score not in self.metrics:
            raise ConfigError(
                f"score is {self.score!r}, and metrics has {', '.join(self.metrics)}; name one of "
                "them"
            )
        if self.metrics and self.evaluations > 1:
            raise ConfigError(
                f"evaluations is {self.evaluations}, and texts are written when a run is over; set "
                "evaluations to 1"
            )
        if empty := [name for name, values in self.grid.items() if not values]:
            raise ConfigError(f"grid.{empty[0]} has no value; name at least one, or leave it out")


@dataclass(frozen=True)
class Task:
    """A task by its name.

    Attributes:
        name: of its file.
        config: what the file says.
        experiment: settings of its runs that are not the defaults, as the file gives them.
        also: sources of further held-out rows, by name, that finished runs are scored on; in the
            file, settings in which they differ from the task's own.
        generation: settings of `generation.Config` that finished runs write texts with;
            max_new_tokens is the objective's target_length where they do not have it.
    """

    name: str
    config: Config
    experiment: Tree
    also: Mapping[str, SourceConfig] = field(default_factory=dict)
    generation: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, recipe: Tree | None = None) -> Task:
        """Reads a file.

        Args:
            path: which.
            recipe: epochs, warmup, grid and experiment, in place of the file's own as far as it has
                them.

        Raises:
            ConfigError: it describes no task.
        """
        tree = read_tree(path)
        if recipe is not None:
            tree = {**merge(tree, recipe), "grid": recipe.get("grid") or tree.get("grid") or {}}
        for name in ("tokenizer", "output"):  # for `samestep data build` alone
            tree.pop(name, None)
        sections = {
            name: tree.pop(name, None) or {} for name in ("experiment", "also", "generation")
        }
        for name, section in sections.items():
            if not isinstance(section, dict):
                raise ConfigError(f"{path}: {name} is {section!r}; it is a section of settings")
        experiment, also, generation = sections.values()
        try:
            config = decode(Config, tree)
            sources = {
                name: _heldout_only(tree["source"], changes, name)
                for name, changes in also.items()
                if changes
            }
            if generation:
                if not config.metrics:
                    raise ConfigError(
                        "generation is for texts that are written, as with seq2seq; leave it out"
                    )
                length = config.objective.task.target_length
                decode(GenerationConfig, {"max_new_tokens": length, **generation}, "generation")
            return cls(path.stem, config, experiment, sources, generation)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def _heldout_only(source: Tree, changes: Tree, name: str) -> SourceConfig:
    """A source like another, with nothing to train on."""
    if changes.get("paths") or (changes.get("dataset") or {}).get("split"):
        raise ConfigError(
            f"also.{name} is of held-out rows alone: name them in heldout, or in dataset.heldout"
        )
    merged = merge(source, changes)
    nothing: Tree = {"paths": []} if merged.get("dataset") is None else {"dataset": {"split": None}}
    config: SourceConfig = decode(_SOURCE, merge(merged, nothing), f"also.{name}")
    return config


def find_tasks(names: Sequence[str], recipe: str | None = None) -> list[Task]:
    """The tasks that are named: files, folders of them, or what lies under configs/tasks, with or
    without its suffix.

    Args:
        names: of them.
        recipe: how they are fine-tuned, in place of their own way: a file, or the name of one in
            configs/tasks.

    Raises:
        ConfigError: a name means nothing, or two tasks have the same.
    """
    settings = None if recipe is None else _read_recipe(recipe)
    found: dict[str, Task] = {}
    for name in names:
        for path in _files(name):
            task = Task.read(path, settings)
            if task.name in found:
                raise ConfigError(f"the task {task.name} is named twice; leave one out")
            found[task.name] = task
    return list(found.values())


def _files(name: str) -> list[Path]:
    folders = _folders()
    for place in (Path(name), *(folder / name for folder in folders)):
        if place.is_dir() and (files := sorted(place.glob("*.yaml"))):
            return files
        for file in (place, place.with_name(f"{place.name}.yaml")):
            if file.is_file():
                return [file]
    for folder in folders:
        if files := sorted(folder.glob(f"*/{name}.yaml")):
            return files[:1]
    known = sorted(
        {str(path.relative_to(folder)) for folder in folders for path in folder.glob("*/*.yaml")}
    )
    raise ConfigError(
        f"no task {name!r}: it is no file or folder here, nor in {_FOLDER}; known: "
        f"{', '.join(known) or 'none'}"
    )


def _read_recipe(name: str) -> Tree:
    """How tasks are fine-tuned, from a file or by the name of one."""
    known = {
        path.stem: path for folder in reversed(_folders()) for path in sorted(folder.glob("*.yaml"))
    }
    path = Path(name) if Path(name).is_file() else known.get(name)
    if path is None:
        raise ConfigError(f"no recipe {name!r}: it is no file here; known: {', '.join(known)}")
    tree = read_tree(path)
    if others := [key for key in tree if key not in _RECIPE]:
        raise ConfigError(
            f"{path} is no recipe, which has {', '.join(_RECIPE)} alone: leave {others[0]} out"
        )
    return tree


def _folders() -> list[Path]:
    """Where tasks and recipes lie: here, and where samestep comes from."""
    return [_FOLDER, Path(trainer.__file__).parents[1] / _FOLDER]
