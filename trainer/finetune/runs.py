"""The runs of a suite: what each is to do, and what its result depends on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.building.build import Config as BuildConfig
from data_pipeline.building.build import build
from data_pipeline.format.manifest import MANIFEST
from data_pipeline.reading.dataset import Dataset, PackedSplit
from data_pipeline.reading.length_groups import can_group
from data_pipeline.sources import SourceConfig
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.config import Kinds, Tree, decode, renamed, to_tree
from trainer.config.tree import merge, parse_override
from trainer.errors import ConfigError
from trainer.finetune.chance import chance
from trainer.finetune.task import Config as TaskConfig
from trainer.finetune.task import Task
from trainer.training.starting import model_of
from trainer.training.weights import load_weights

_OBJECTIVE = Annotated[Any, Kinds("trainer.objectives")]
_OWN = ("output", "init_from", "seed")  # settings that the suite makes itself
_DEFAULTS: Tree = {
    "training": {"global_batch_size": 32},
    "optimizer": {"kind": "adamw"},
    "strategy": {"kind": "single"},
    "data": {"packing": "padded"},
}


@dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Attributes:
        task: its name.
        settings: what the grid chose.
        seed: of the head's weights, the order of the rows and dropout.
        folder: where it goes.
        experiment: all its settings, but for `init_from` where there is a `start`.
        digest: of all that its result depends on, but for the code.
        score: the metric that it is compared by.
        metrics: all that the objective or, where answers are texts, the task names; the score is
            one of them.
        chance: what that is for a model that always says the same.
        start: the digests of runs of another task, of which it starts from the best.
        scratch: whether it starts from random weights.
        evaluations: arguments of `samestep evaluate` that score it when it is over, by what comes
            before the names of these scores.
    """

    task: str
    settings: Mapping[str, float]
    seed: int
    folder: Path
    experiment: Tree
    digest: str
    score: str
    metrics: tuple[str, ...]
    chance: float
    start: tuple[str, ...] = ()
    scratch: bool = False
    evaluations: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For a reader: what sets it apart from the task's other runs."""
        chosen = [f"{key.rpartition('.')[2]}-{value:g}" for key, value in self.settings.items()]
        return "-".join([*chosen, *(["scratch"] if self.scratch else []), f"seed-{self.seed}"])

    @property
    def weights(self) -> str:
        """What `load_weights` opens when it is over: its best checkpoint, or its last."""
        return (
            f"{self.folder}/best" if self.experiment["training"].get("best") else str(self.folder)
        )


def list_runs(
    checkpoint: str,
    tasks: Sequence[Task],
    folder: Path,
    seeds: int,
    whole_grid: bool,
    overrides: Sequence[str],
    scratch: bool = False,
) -> list[Run]:
    """Builds the datasets that are not there yet and lists the runs.

    Args:
        checkpoint: what they start from; see `load_weights`.
        tasks: what they are of.
        folder: of the suite.
        seeds: how many of them, from 0.
        whole_grid: whether every point of the tasks' grids is tried.
        overrides: settings of all runs, as on the command line; one that a grid has is not varied.
        scratch: whether there are as many runs from random weights of the checkpoint's
            architecture, too, of the tasks that start from the checkpoint.

    Returns:
        The runs, in an order in which each follows the runs that it starts from.

    Raises:
        ConfigError: a setting cannot be overridden, or does not fit.
        CheckpointError: there is nothing to start from.
        DataError: the rows of a task cannot be read.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, not {seeds}")
    changes: Tree = {}
    for override in overrides:
        changes = merge(changes, parse_override(override))
    if own := [name for name in _OWN if name in changes]:
        raise ConfigError(f"{own[0]} is what the suite sets for each run; leave {own[0]}=... out")
    if _has(changes, "training.best"):
        raise ConfigError(
            "training.best is for evaluations and patience in a task's file to set; leave it out"
        )
    ordered = _in_order(tasks)
    weights = load_weights(checkpoint)
    model = renamed.original({"model": to_tree(weights.config)})["model"]
    runs: list[Run] = []
    with weights.tokenizer_files() as tokenizer:
        for task in ordered:
            dataset = _dataset(task.name, task.config, task.config.source, tokenizer, folder)
            also = {
                name: _dataset(f"{task.name}-{name}", task.config, source, tokenizer, folder)
                for name, source in task.also.items()
            }
            rows = [
                dataset.manifest.digest,
                *(f"{name} {found.manifest.digest}" for name, found in also.items()),
            ]
            points = list(_points(task, dataset, also, whole_grid, changes))
            before = tuple(
                run.digest for run in runs if run.task == task.config.start and not run.scratch
            )
            of = [weights.identity(), model, *rows, *before]
            for point in points:
                # The run before has already selected the checkpoint's layers.
                start = (
                    {"init_layers": [], "redraw_layers": 0} if before else {"init_from": checkpoint}
                )
                runs += _seeded(task, folder, point.having(start), of, seeds, start=before)
            for point in points if scratch and not before else ():
                new_model = model_of({**point.experiment, "init_from": checkpoint})
                new_model = merge(new_model, point.experiment.get("model") or {})
                initialized = {
                    "model": {**new_model, "peft": None},
                    "frozen": [],
                    "init_layers": [],
                    "redraw_layers": 0,
                }
                runs += _seeded(task, folder, point.having(initialized), rows, seeds, scratch=True)
    return runs


def _in_order(tasks: Sequence[Task]) -> list[Task]:
    """Each task behind the one that it starts from."""
    ordered: list[Task] = []
    while left := [task for task in tasks if task not in ordered]:
        there = {None, *(task.name for task in ordered)}
        ready = [task for task in left if task.config.start in there]
        if not ready:
            raise ConfigError(
                f"{left[0].name} starts from {left[0].config.start}, which is not among --tasks, "
                "or starts from it in "
                "turn; name it, too"
            )
        ordered += ready
    return ordered


@dataclass(frozen=True)
class _Point:
    """A point of a task's grid.

    Attributes:
        settings: what the grid has chosen.
        experiment: all settings but the seed and the output.
        metrics, chance, evaluations: as in `Run`.
        of: what results depend on besides.
    """

    settings: Mapping[str, float]
    experiment: Tree
    metrics: tuple[str, ...]
    chance: float
    evaluations: Mapping[str, Sequence[str]]
    of: Sequence[str]

    def having(self, changes: Tree) -> _Point:
        """The same with these sections of the experiment."""
        return replace(self, experiment={**self.experiment, **changes})


def _seeded(
    task: Task,
    folder: Path,
    point: _Point,
    of: Sequence[object],
    seeds: int,
    start: tuple[str, ...] = (),
    scratch: bool = False,
) -> Iterator[Run]:
    """The runs of a point: one for each seed.

    Args:
        task: theirs.
        folder: of the suite.
        point: of the grid.
        of: what else their results depend on.
        seeds: how many.
        start, scratch: as in `Run`.
    """
    for seed in range(seeds):
        experiment = {**point.experiment, "seed": seed}
        settings = renamed.original(_without_paths(experiment))
        content = json.dumps([settings, *point.of, *of], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        run = Run(
            task=task.name,
            settings=point.settings,
            seed=seed,
            folder=folder,
            experiment=experiment,
            digest=digest,
            score=task.config.score,
            metrics=point.metrics,
            chance=point.chance,
            evaluations=point.evaluations,
            start=start,
            scratch=scratch,
        )
        place = folder / "runs" / task.name / f"{run.name}-{digest[:8]}"
        yield replace(run, folder=place, experiment={"output": str(place), **experiment})


def _points(
    task: Task, dataset: Dataset, also: Mapping[str, Dataset], whole_grid: bool, changes: Tree
) -> Iterator[_Point]:
    config = task.config
    own: Tree = {
        "objective": to_tree(config)["objective"],
        "data": {"sequence_length": config.sequence_length},
    }
    teacher = decode(_OBJECTIVE, merge(own, changes)["objective"], "objective").teacher_path
    generation = [f"{name}={json.dumps(value)}" for name, value in task.generation.items()]
    of = (
        *config.metrics,
        *generation,
        *(() if teacher is None else (load_weights(teacher).identity(),)),
    )
    grid = {name: values for name, values in config.grid.items() if not _has(changes, name)}
    grid = grid if whole_grid else {name: values[:1] for name, values in grid.items()}
    for point in itertools.product(*grid.values()):
        settings = dict(zip(grid, point, strict=True))
        tree = merge(merge(_DEFAULTS, task.experiment), own)
        for name, value in settings.items():
            tree = merge(tree, parse_override(f"{name}={value:g}"))
        tree = merge(tree, changes)
        predicted = decode(_OBJECTIVE, tree["objective"], "objective")
        objective = predicted.build(dataset.tokenizer.vocabulary)
        spec, policy = objective.pack_spec(tree["data"]["sequence_length"]), tree["data"]["packing"]
        if not can_group(spec):
            tree = merge(tree, {"data": {"group_by_length": None}})
        examples = int(PackedSplit(dataset, "train", spec, policy, seed=0).counts.sum())
        steps = tree["training"].get(
            "steps", math.ceil(examples * config.epochs / tree["training"]["global_batch_size"])
        )
        by_steps: Tree = {
            "training": {"steps": steps, "evaluate_every": math.ceil(steps / config.evaluations)},
            "schedule": {"warmup_steps": int(config.warmup * steps)},
            "data": {"path": str(dataset.path)},
        }
        if config.evaluations > 1:
            by_steps["training"]["best"] = {
                "metric": config.score,
                "mode": "max",
                "patience": config.patience,
            }
        experiment = merge(by_steps, tree)
        baseline = chance(objective, dataset, config.score)
        evaluations = _evaluations(predicted, experiment, config.metrics, generation, also)
        yield _Point(
            settings, experiment, config.metrics or objective.score_names, baseline, evaluations, of
        )


def _evaluations(
    predicted: Any,
    experiment: Tree,
    metrics: Sequence[str],
    generation: Sequence[str],
    also: Mapping[str, Dataset],
) -> Mapping[str, Sequence[str]]:
    """How a run is scored when it is over.

    On further rows, and where its answers are texts, on the task's own.
    """
    data = {f"{name}/": [f"data.path={dataset.path}"] for name, dataset in also.items()}
    if metrics:
        length = f"max_new_tokens={predicted.task.target_length}"
        generated = ["--generate", length, *generation, "--metrics", *metrics]
        return {name: [*where, *generated] for name, where in {"": list[str](), **data}.items()}
    best = ["--step", "best"] if experiment["training"].get("best") else []
    return {name: [*where, *best] for name, where in data.items()}


def _without_paths(experiment: Tree) -> Tree:
    """What stays the same where a suite or its checkpoint has been moved.

    Digests say what lies there.
    """
    return {**experiment, "data": {**experiment["data"], "path": None}, "init_from": None}


def _has(tree: Tree, name: str) -> bool:
    for key in name.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _dataset(
    name: str, task: TaskConfig, source: SourceConfig, tokenizer: Path, folder: Path
) -> Dataset:
    """The dataset of a task's source, in a folder that is named by all that it is made of."""
    config = BuildConfig(
        source,
        TokenizerConfig(str(tokenizer)),
        output="",
        heldout_fraction=task.heldout_fraction,
        on_error=task.on_error,
    )
    tree = to_tree(config)
    made_of = [
        tree["source"],
        tree["heldout_fraction"],
        tree["on_error"],
        Tokenizer.load(tokenizer).fingerprint,
    ]
    hub = tree["source"].get("dataset") or {}
    folder_files = (
        sorted(Path(hub["path"]).rglob("*")) if Path(hub.get("path", "")).is_dir() and hub else []
    )
    made_of += [_stamp(file) for file in (*map(Path, source.build().files), *folder_files)]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:8]
    output = folder / "data" / f"{name}-{digest}"
    if not (output / MANIFEST).exists():
        build(replace(config, output=str(output)))
    return Dataset.open(output)


def _stamp(file: Path) -> list[str | int]:
    """What changes with a file's content: name, size and time; of an address, the name alone."""
    if not file.is_file():
        return [str(file)]
    found = file.stat()
    return [str(file), found.st_size, found.st_mtime_ns]
