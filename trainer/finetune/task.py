"""A fine-tuning task in one file: its rows, what is predicted of them, and how BERT was fine-tuned on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import trainer
from trainer.config import Kinds, Tree, decode, read_tree
from trainer.errors import ConfigError

_FOLDER = Path("configs", "tasks")


@dataclass(frozen=True)
class Config:
    """A task.

    Attributes:
        source: its rows, held-out ones among them.
        objective: what is predicted.
        score: the metric of the objective that runs are compared by.
        heldout_fraction: share of the rows that is held out, where the source names none that are.
        on_error: whether a bad row stops the build or is left out ("skip"), counted and listed.
        epochs: passes over the rows to train on.
        warmup: share of the steps in which the learning rate rises.
        sequence_length: cells of an example.
        grid: settings of the experiment to try, each with its values; the first of each is taken unless all are asked
            for.
        evaluations: how many a run has, evenly spread; of several, its scores are those of the best one.
        patience: a run ends after so many of them in a row without a better one; null trains to the last step.
        start: another task of the suite: the runs of this one start from its best run, as those of RTE from MNLI's
            (Phang et al. 2018); null: from the suite's checkpoint.
        published: scores of others, by name of the metric, to compare with.
        published_by: who they are of.
    """

    source: Annotated[Any, Kinds("data_pipeline.sources")]
    objective: Annotated[Any, Kinds("trainer.objectives")]
    score: str
    heldout_fraction: float = 0.1
    on_error: Literal["stop", "skip"] = "stop"
    epochs: float = 3.0
    warmup: float = 0.1
    sequence_length: int = 128
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: int = 1
    patience: int | None = None
    start: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    published_by: str = "BERT-base"

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise ConfigError(f"epochs is {self.epochs}; use a number above 0, as 3")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup is a share of the steps in [0, 1), not {self.warmup}")
        if self.evaluations < 1:
            raise ConfigError(f"evaluations must be at least 1, not {self.evaluations}")
        if self.patience is not None and not 1 <= self.patience < self.evaluations:
            raise ConfigError(
                f"patience is {self.patience} of {self.evaluations} evaluations; use 1 or more, and fewer than these"
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
    """

    name: str
    config: Config
    experiment: Tree

    @classmethod
    def read(cls, path: Path) -> Task:
        """Reads a file.

        Raises:
            ConfigError: it describes no task.
        """
        tree = read_tree(path)
        experiment = tree.pop("experiment", None) or {}
        try:
            return cls(path.stem, decode(Config, tree), experiment)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks that are named: files, folders of them, or what lies under configs/tasks, with or without its suffix.

    Raises:
        ConfigError: a name means nothing, or two tasks have the same.
    """
    found: dict[str, Task] = {}
    for name in names:
        for path in _files(name):
            task = Task.read(path)
            if task.name in found:
                raise ConfigError(f"the task {task.name} is named twice; leave one out")
            found[task.name] = task
    return list(found.values())


def _files(name: str) -> list[Path]:
    folders = [_FOLDER, Path(trainer.__file__).parents[1] / _FOLDER]
    for place in (Path(name), *(folder / name for folder in folders)):
        if place.is_dir() and (files := sorted(place.glob("*.yaml"))):
            return files
        for file in (place, place.with_name(f"{place.name}.yaml")):
            if file.is_file():
                return [file]
    for folder in folders:
        if files := sorted(folder.glob(f"*/{name}.yaml")):
            return files[:1]
    known = sorted({str(path.relative_to(folder)) for folder in folders for path in folder.glob("*/*.yaml")})
    raise ConfigError(
        f"no task {name!r}: it is no file or folder here, nor in {_FOLDER}; known: {', '.join(known) or 'none'}"
    )
