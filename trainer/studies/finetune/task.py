"""A fine-tuning task in one file: its rows, its objective, and how models are fine-tuned on it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.building.recipe import TaskData
from data_pipeline.sources import SourceConfig
from samestep.config import Kinds, Tree, decode, read_tree, recipes
from samestep.config.tree import files_of, merge
from samestep.errors import ConfigError
from trainer.generation.config import Config as GenerationConfig
from trainer.metrics.texts import METRICS

_FOLDER = Path("configs", "tasks")
# Tasks and recipes are looked up here first, then among the files that come with samestep.
_FOLDERS = (_FOLDER, recipes.FOLDER / "tasks")
_ROWS = ("source", "heldout_fraction", "rows")  # settings that choose rows
_RECIPE = ("epochs", "warmup", "unfreeze_epochs", "grid", "experiment")
_SOURCE = Annotated[SourceConfig, Kinds("data_pipeline.sources.kinds")]


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """The model that published scores are of, by settings that tell its family and size.

    Attributes:
        kind: of `model`; null is any.
        layers: number of them; null is any.
        width: of the hidden states; null is any.
    """

    kind: str | None = None
    layers: int | None = None
    width: int | None = None

    def matches(self, model: Tree) -> bool:
        """Whether the settings of a model agree."""
        return all(value in (None, model.get(name)) for name, value in vars(self).items())


@dataclass(frozen=True, kw_only=True)
class Config(TaskData):
    """A task: its rows, and how models are fine-tuned and scored on them.

    Attributes:
        objective: of the runs, with the kind of prediction.
        score: the metric that runs are compared by.
        epochs: number of passes over the training rows.
        warmup: fraction of the steps in which the learning rate rises.
        unfreeze_epochs: number of passes over the training rows, as 1 or 0.5, after which one more
            layer is trained (`optimizer.unfreeze_every`); null trains all from the first step.
        sequence_length: positions of an example.
        metrics: of generated texts, as in `samestep evaluate --metrics`; finished runs generate
            them.
        grid: the values to try for settings of the experiment; the first of each is used unless
            the whole grid is requested.
        evaluations: number of evaluations of a run, evenly spread. The best of several counts.
        patience: a run ends after this many evaluations in a row without a better one; null trains
            to the last step.
        start: another task of the suite; the runs of this one start from its best run, as RTE
            from MNLI (Phang et al. 2018); null starts from the suite's checkpoint.
        published: scores that others have reported, by metric; NAME/METRIC is of the further
            held-out rows NAME.
        published_by: who has reported them.
        published_model: the model that the scores are of; other models' rows do not show them.
    """

    objective: Annotated[Any, Kinds("trainer.objectives.kinds")]
    score: str
    epochs: float = 3.0
    warmup: float = 0.1
    unfreeze_epochs: float | None = None
    sequence_length: int = 128
    metrics: tuple[str, ...] = ()
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: int = 1
    patience: int | None = None
    start: str | None = None
    published: dict[str, float] = field(default_factory=dict)
    published_by: str = "BERT-base (Devlin et al. 2019)"
    published_model: PublishedModel = field(default_factory=PublishedModel)

    def __post_init__(self) -> None:
        # Training checks the settings that follow from epochs, warmup and patience.
        if self.evaluations < 1:
            raise ConfigError(f"evaluations is {self.evaluations}. Use at least 1.")
        if self.unfreeze_epochs is not None and self.unfreeze_epochs <= 0:
            raise ConfigError(
                f"unfreeze_epochs is {self.unfreeze_epochs}. Use a number above 0, or null."
            )
        for name, values in self.grid.items():
            if not values:
                raise ConfigError(f"grid.{name} has no value. Name at least one, or leave it out.")
        if self.objective.task.writes_text:
            self._check_metrics()
        elif self.metrics:
            raise ConfigError(
                f"metrics has {', '.join(self.metrics)}, and the objective generates no texts. "
                "To score its predictions, name them in objective.metrics instead."
            )

    def _check_metrics(self) -> None:
        if not self.metrics:
            raise ConfigError(
                "metrics is empty, and seq2seq needs metrics of generated texts. "
                "Name some, as accuracy."
            )
        unknown = set(self.metrics).difference(METRICS)
        if unknown:
            raise ConfigError(
                f"metrics has {', '.join(sorted(unknown))}. Use some of {', '.join(METRICS)}."
            )
        if self.score not in self.metrics:
            raise ConfigError(
                f"score is {self.score!r}, and metrics has {', '.join(self.metrics)}. "
                "Use one of these."
            )
        if self.evaluations > 1:
            raise ConfigError(
                f"evaluations is {self.evaluations}, and texts are generated only after the last "
                "step. Set evaluations to 1."
            )


@dataclass(frozen=True)
class Task:
    """A task by its name.

    Attributes:
        name: of its file.
        config: the rest of the file.
        experiment: settings of its runs that differ from the defaults.
        also: sources of further held-out rows, by name, on which finished runs are scored too. In
            the file, only the settings that differ from the task's own source.
        own_rows: sets of held-out rows (a name of `also`, or "" for the task's own) that are others
            than the published scores': a file names other rows after the file that states
            the scores.
        generation: settings of `generation.Config` for finished runs that generate texts;
            max_new_tokens is by default the objective's target_length.
    """

    name: str
    config: Config
    experiment: Tree
    also: Mapping[str, SourceConfig] = field(default_factory=dict)
    generation: Mapping[str, object] = field(default_factory=dict)
    own_rows: frozenset[str] = frozenset()

    @property
    def published(self) -> dict[str, float]:
        """The published scores of these rows, in percent."""
        scores = self.config.published
        if "" in self.own_rows:  # a model trained on other rows is not comparable on any
            return {}
        return {
            name: score
            for name, score in scores.items()
            if name.rpartition("/")[0] not in self.own_rows
        }

    @classmethod
    def read(
        cls,
        path: Path,
        recipe: Tree | None = None,
    ) -> Task:
        """Reads a file.

        Args:
            path: the file.
            recipe: epochs, warmup, unfreeze_epochs, grid and experiment that replace the file's; a
                setting of the model that is null is left out.

        Raises:
            ConfigError: the file does not describe a task.
        """
        tree = read_tree(path)
        if recipe is not None:
            # A grid replaces the task's as a whole: values for the same setting do not add up.
            tree = {**merge(tree, recipe), "grid": recipe.get("grid") or tree.get("grid") or {}}
            _leave_out(tree, (recipe.get("experiment") or {}).get("model") or {})
        for name in ("tokenizer", "output"):  # used by `samestep data build` only
            tree.pop(name, None)
        sections: dict[str, Tree] = {}
        for name in ("experiment", "also", "generation"):
            sections[name] = tree.pop(name, None) or {}
            if not isinstance(sections[name], dict):
                raise ConfigError(
                    f"{path}: {name} is {sections[name]!r}; it is a section of settings"
                )
        # A task that is based on another one removes its further rows with `also: null`, or one
        # set of them with `also: {NAME: null}`.
        try:
            config = decode(Config, tree)
            also = {
                name: _heldout_only(tree["source"], changes, name)
                for name, changes in sections["also"].items()
                if changes
            }
            _check_generation(config, sections["generation"])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls(
            path.stem,
            config,
            sections["experiment"],
            also,
            sections["generation"],
            _own_rows(path),
        )


def _own_rows(path: Path) -> frozenset[str]:
    """The sets of rows that a file changes after the last one that states scores."""
    # Example: configs/tasks/glue/sst2.yaml has source and published. A file that is based on it
    # and has another source, or just fewer of its rows, has rows without published scores.
    own: set[str] = set()
    for tree in files_of(path):
        if "published" in tree:
            own = set()
            continue
        if not tree.keys().isdisjoint(_ROWS):
            own.add("")
        own |= {name for name, changes in (tree.get("also") or {}).items() if changes}
    return frozenset(own)


def _check_generation(config: Config, generation: Tree) -> None:
    if generation and not config.metrics:
        raise ConfigError(
            "generation is set, and the objective generates no texts. Leave it out, or use seq2seq."
        )
    # Decoded only to check the settings: `samestep evaluate` gets them as arguments.
    length = config.objective.task.target_length
    if generation:
        decode(GenerationConfig, {"max_new_tokens": length, **generation}, "generation")


def _heldout_only(source: Tree, changes: Tree, name: str) -> SourceConfig:
    """The task's source with changes, and without rows to train on."""
    if changes.get("paths") or (changes.get("dataset") or {}).get("split"):
        raise ConfigError(
            f"also.{name} names rows to train on, and only held-out rows are used. "
            "Name them in heldout, or in dataset.heldout."
        )
    # Without training rows, all rows of the files are held out: none is chosen by hash.
    merged = merge(source, changes)
    nothing: Tree = {"paths": []} if merged.get("dataset") is None else {"dataset": {"split": None}}
    config: SourceConfig = decode(_SOURCE, merge(merged, nothing), f"also.{name}")
    return config


def _leave_out(tree: Tree, of_recipe: Tree) -> None:
    """Removes the settings of the model that are null in a recipe: other models lack them."""
    model = (tree.get("experiment") or {}).get("model") or {}
    for name in [name for name, value in of_recipe.items() if value is None]:
        model.pop(name, None)


def find_tasks(
    names: Sequence[str],
    recipe: str | None = None,
) -> list[Task]:
    """Returns the tasks with these names.

    Args:
        names: files, or folders of files, relative to the working folder or to configs/tasks, with
            or without .yaml; names of recipes or of their folders, as recipes/tasks/glue; or just
            the name of a file in a folder of configs/tasks.
        recipe: settings that replace the tasks' own: a file, or the name of one in configs/tasks.

    Raises:
        ConfigError: a name is unknown, or two tasks have the same name.
    """
    settings = None if recipe is None else _read_recipe(recipe)
    found: dict[str, Task] = {}
    for path in (path for name in names for path in _files(name)):
        task = Task.read(path, settings)
        if task.name in found:
            raise ConfigError(f"the task {task.name} is named twice. Leave one out.")
        found[task.name] = task
    return list(found.values())


def _files(name: str) -> list[Path]:
    # A path comes before the bare name of a file in some folder of configs/tasks.
    for place in (Path(name), recipes.locate(name), *(folder / name for folder in _FOLDERS)):
        if files := sorted(place.glob("*.yaml")):
            return files
        for file in (place, place.with_name(f"{place.name}.yaml")):
            if file.is_file():
                return [file]
    inner = [(folder, path) for folder in _FOLDERS for path in sorted(folder.glob("*/*.yaml"))]
    for _, path in inner:
        if path.stem == name:
            return [path]
    known = sorted({str(path.relative_to(folder)) for folder, path in inner})
    close = difflib.get_close_matches(name, [path.stem for _, path in inner], n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    raise ConfigError(
        f"no task {name!r} in the working folder or in {_FOLDER}{meant} Use a file, a folder, or "
        f"one of {', '.join(known) or 'none'}."
    )


def _read_recipe(name: str) -> Tree:
    # Reversed, so that a recipe of the working folder replaces one of the same name.
    known = {
        path.stem: path for folder in reversed(_FOLDERS) for path in sorted(folder.glob("*.yaml"))
    }
    file = recipes.locate(name)
    path = file if file.is_file() else known.get(name)
    if path is None:
        raise ConfigError(f"no recipe {name!r}. Use a file, or one of {', '.join(known)}.")
    tree = read_tree(path)
    if others := [key for key in tree if key not in _RECIPE]:
        raise ConfigError(
            f"{path} has {others[0]}, and a recipe has only {', '.join(_RECIPE)}. "
            f"Leave {others[0]} out."
        )
    return tree
