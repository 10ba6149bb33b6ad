"""The runs of a suite: the settings of each, and a digest of everything its result depends on."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.format.manifest import MANIFEST
from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.length_groups import can_group
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.sources import SourceConfig
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import Kinds, Tree, decode, renamed, to_tree
from samestep.config.tree import merge, merge_overrides, parse_override
from samestep.errors import ConfigError
from samestep.hashing import json_hash
from trainer.models import ModelConfig
from trainer.studies.finetune.chance import constant_scores, upper_end
from trainer.studies.finetune.task import Config as TaskConfig
from trainer.studies.finetune.task import Task
from trainer.studies.inputs import stamps
from trainer.training.starting import model_of
from trainer.training.weights.loading import load_weights

Start: TypeAlias = Literal["checkpoint", "random"]
_CHECKPOINT: tuple[Start, ...] = ("checkpoint",)

_MODELS = Kinds("trainer.models.families")
_OBJECTIVE = Annotated[Any, Kinds("trainer.objectives.kinds")]
# For settings that neither a task's file nor its recipe has.
_DEFAULTS: Tree = {
    "training": {"global_batch_size": 32},
    "optimizer": {"kind": "adamw"},
    "strategy": {"kind": "single"},
    "data": {"packing": "padded"},
}


@dataclass(frozen=True)
class Run:
    """A fine-tuning run.

    Attributes:
        task: name of the task.
        settings: values that the grid has chosen.
        experiment: all settings, but for `init_from` if the run has a `start`.
        metrics: all metrics that the run reports.
        score: the metric among them that runs are compared by.
        constants: the metrics of a model that always gives the same answer, by name.
        learns_above: a run with a higher `score` has learned something; see `upper_end`.
        comparable: whether published scores of the task are of such a model and these rows.
        evaluations: arguments of `samestep evaluate` that score the finished run, by the prefix
            of the names of these scores.
        depends_on: inputs of the result besides the settings, the seed and the code.
        folder: output folder.
        start: digests of another task's runs; the run starts from the best of them.
        scratch: whether it starts from random weights.
        seed: of the head's initial weights, of the order of the rows, and of dropout.
        digest: of the settings, the seed and `depends_on`.
    """

    task: str
    settings: Mapping[str, float]
    experiment: Tree
    metrics: tuple[str, ...]
    score: str
    constants: Mapping[str, float]
    learns_above: float
    evaluations: Mapping[str, Sequence[str]]
    depends_on: tuple[object, ...]
    folder: Path
    start: tuple[str, ...] = ()
    scratch: bool = False
    seed: int = 0
    digest: str = ""
    comparable: bool = False

    @property
    def after(self) -> tuple[str, ...]:
        """The runs that must be finished before this one."""
        return self.start

    @property
    def predicts(self) -> bool:
        """Whether a head predicts something for each row; a run that generates texts has none."""
        return "" not in self.evaluations

    @property
    def name(self) -> str:
        """Tells the run from the task's other runs."""
        parts = [f"{key.rpartition('.')[2]}-{value:g}" for key, value in self.settings.items()]
        if self.scratch:
            parts.append("scratch")
        return "-".join([*parts, f"seed-{self.seed}"])

    @property
    def keeps_best(self) -> bool:
        """Whether the best of several evaluations counts, instead of the last."""
        return bool(self.experiment["training"].get("best"))


def list_runs(
    checkpoint: str,
    tasks: Sequence[Task],
    folder: Path,
    seeds: Sequence[int],
    whole_grid: bool,
    overrides: Sequence[str],
    starts: Collection[Start] = _CHECKPOINT,
) -> list[Run]:
    """Builds missing datasets and lists the runs, each after the runs that it starts from.

    Args:
        checkpoint: the initial weights; see `load_weights`.
        folder: of the suite.
        seeds: of the runs of each setting.
        whole_grid: whether to try every point of the tasks' grids.
        overrides: settings of all runs, as on the command line; the grid does not vary them.
        starts: "checkpoint" for runs that start from it, "random" for as many runs from random
            weights of its architecture, or both; "random" adds none to a task that starts from
            another task.

    Raises:
        ConfigError: a setting cannot be overridden, or has an invalid value.
        CheckpointError: the checkpoint is missing or damaged.
        DataError: the rows of a task cannot be read.
    """
    # All that the arguments can get wrong is found before the checkpoint is opened.
    changes = _overridden(overrides)
    ordered = _in_order(tasks)
    weights = load_weights(checkpoint)
    # With the names of settings in digests, so that finished runs are found.
    model = renamed.original({"model": to_tree(weights.config)})["model"]
    runs: list[Run] = []
    with weights.tokenizer_files() as tokenizer:
        for task in ordered:
            sources = {"": task.config.source, **task.also}
            datasets = {
                name: _dataset(task, name, source, tokenizer, folder)
                for name, source in sources.items()
            }
            # For example ["3f2a", "mismatched 91bc"]: other held-out rows are another run, too.
            rows = [f"{name} {data.manifest.digest}".lstrip() for name, data in datasets.items()]
            parents = [run for run in runs if run.task == task.config.start and not run.scratch]
            start = tuple(parent.digest for parent in parents)
            # The weights of a parent already have the checkpoint's selected layers.
            loading: Tree = {"init_layers": [], "redraw_layers": 0}
            if not parents:
                loading = {"init_from": checkpoint}
            points = _points(task, datasets, whole_grid, changes, folder)
            if "checkpoint" in starts:
                _check_kind(points, _MODELS.kind_of(weights.config))
            variants = [
                replace(
                    point,
                    experiment=point.experiment | loading,
                    start=start,
                    depends_on=(*point.depends_on, weights.identity(), model, *rows, *start),
                    comparable=_comparable(task, weights.config, point.experiment),
                )
                for point in points
            ]
            if "checkpoint" not in starts:
                variants = []
            if "random" in starts and not parents:
                variants += [_from_scratch(point, checkpoint, rows) for point in points]
            runs += [_seeded(run, seed) for run in variants for seed in seeds]
    return runs


def _check_kind(points: Sequence[Run], kind: str) -> None:
    """Rejects another kind of model than the checkpoint's, which its weights do not fit."""
    for point in points:
        other = (point.experiment.get("model") or {}).get("kind", kind)
        if other != kind:
            raise ConfigError(
                f"model.kind is {other}, and the checkpoint is of kind {kind}. Add --scratch-only, "
                "for which it gives the tokenizer, or leave model.kind out."
            )


def _comparable(task: Task, model: ModelConfig, experiment: Tree) -> bool:
    """Whether the task's published scores are of such a model, and of all of these rows."""
    tree = {"kind": _MODELS.kind_of(model), **to_tree(model)}
    same_model = task.config.published_model.matches(tree)
    return same_model and experiment["training"].get("evaluate_batches") is None


def _overridden(overrides: Sequence[str]) -> Tree:
    """Merges the overrides.

    Raises:
        ConfigError: one of them is a setting that the suite chooses for each run, or drops another.
    """
    changes = merge_overrides({}, overrides)
    for name in ("output", "init_from", "seed"):
        if name in changes:
            raise ConfigError(f"{name} is chosen by the suite for each run; leave {name}=... out")
    if _has(changes, "training.best"):
        raise ConfigError(
            "training.best is set by the suite; leave it out. Set evaluations and patience in the "
            "task's file."
        )
    return changes


def _in_order(tasks: Sequence[Task]) -> list[Task]:
    """Each task after the one that it starts from."""
    # In rounds. For mnli, rte (from mnli) and qnli: first mnli and qnli, then rte. A round
    # without a task that is ready means that a start is missing, or that starts form a circle.
    ordered: list[Task] = []
    while left := [task for task in tasks if task not in ordered]:
        possible = {None, *(task.name for task in ordered)}
        ready = [task for task in left if task.config.start in possible]
        if not ready:
            name, start = left[0].name, left[0].config.start
            raise ConfigError(
                f"{name} starts from {start}, which is not among --tasks, or in turn starts from "
                f"{name}. Add {start} to --tasks."
            )
        ordered += ready
    return ordered


def _from_scratch(
    point: Run,
    checkpoint: str,
    rows: Sequence[str],
) -> Run:
    """The same run from random weights: no adapter, no frozen or selected layers.

    A model of another kind than the checkpoint's has its vocabulary and the task's labels.
    """
    before = model_of({**point.experiment, "init_from": checkpoint})
    own = point.experiment.get("model") or {}
    model = merge({"model": before}, {"model": own})["model"]
    # CBoW beside a BERT, for example: the settings of the BERT's layers mean nothing to it.
    if model["kind"] != before["kind"]:
        model = {name: before[name] for name in ("vocab_size", "labels")} | model
    if "peft" in model:  # recurrent models have none
        model["peft"] = None
    changes = {
        "model": model,
        "frozen": [],
        "init_layers": [],
        "redraw_layers": 0,
    }
    depends_on = (*point.depends_on, *rows)
    experiment = point.experiment | changes
    return replace(point, experiment=experiment, depends_on=depends_on, scratch=True)


def _seeded(run: Run, seed: int) -> Run:
    """The run with a seed, and with the digest and output folder that follow from it."""
    experiment = {**run.experiment, "seed": seed}
    # A suite or checkpoint that has moved is still the same: digests say what lies there.
    no_paths = {"data": {**experiment["data"], "path": None}, "init_from": None}
    settings = renamed.original(experiment | no_paths)
    digest = json_hash([settings, *run.depends_on])[:16]
    run = replace(run, seed=seed, digest=digest)
    output = run.folder / "runs" / run.task / f"{run.name}-{digest[:8]}"
    return replace(run, folder=output, experiment={"output": str(output), **experiment})


def _points(
    task: Task, datasets: Mapping[str, Dataset], whole_grid: bool, changes: Tree, folder: Path
) -> list[Run]:
    """The points of a task's grid, as runs without a start, a seed and an output folder."""
    config, dataset, points = task.config, datasets[""], []
    heldout = sum(shard.documents for shard in dataset.shards("heldout"))
    generation = [f"{name}={json.dumps(value)}" for name, value in task.generation.items()]
    own: Tree = {
        "objective": to_tree(config)["objective"],
        "data": {"sequence_length": config.sequence_length},
    }
    # A learning rate on the command line is for all runs, so the grid has no rates then.
    grid = {
        name: values if whole_grid else values[:1]
        for name, values in config.grid.items()
        if not _has(changes, name)
    }
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        tree = merge(merge(_DEFAULTS, task.experiment), own)
        for name, value in settings.items():
            tree = merge(tree, parse_override(f"{name}={value:g}"))
        # Overrides come last: another kind of optimizer, say, drops the settings of the grid's.
        tree = merge(tree, changes)
        predicted: Any = decode(_OBJECTIVE, tree["objective"], "objective")
        objective = predicted.build(dataset.tokenizer.vocabulary)
        spec = objective.pack_spec(tree["data"]["sequence_length"])
        if not can_group(spec):
            # The tasks' recipes group rows by length, which rows of several sequences cannot be.
            tree = merge(tree, {"data": {"group_by_length": None}})
        split = PackedSplit(dataset, "train", spec, tree["data"]["packing"], seed=0)
        examples = int(split.counts.sum())
        tree = _unfreezing(config, tree, examples)
        derived = _derived(config, tree["training"], examples)
        experiment = merge(merge(derived, {"data": {"path": str(dataset.path)}}), tree)

        metrics = config.metrics or objective.score_names
        if config.score not in metrics:
            raise ConfigError(
                f"score is {config.score!r}, and the objective gives "
                f"{', '.join(metrics) or 'none'}. Use one of these."
            )
        teacher = predicted.teacher_path
        identities = [] if teacher is None else [load_weights(teacher).identity()]
        evaluate: list[str] = []
        if config.metrics:
            length = f"max_new_tokens={predicted.task.target_length}"
            evaluate = ["--generate", length, *generation, "--metrics", *metrics]
        elif experiment["training"].get("best"):
            evaluate = ["--step", "best"]
        # A task has the labels of all its sets of rows.
        constants = {
            f"{name}/{metric}".removeprefix("/"): value
            for name, rows in datasets.items()
            for metric, value in constant_scores(objective, rows, metrics).items()
        }
        points.append(
            Run(
                task=task.name,
                settings=settings,
                experiment=experiment,
                metrics=metrics,
                score=config.score,
                constants=constants,
                learns_above=upper_end(config.score, constants[config.score], heldout),
                evaluations=_evaluations(datasets, evaluate, after_training=bool(config.metrics)),
                depends_on=(*config.metrics, *generation, *identities),
                folder=folder,
            )
        )
    return points


def _evaluations(
    datasets: Mapping[str, Dataset], options: list[str], after_training: bool
) -> dict[str, list[str]]:
    """Options of `samestep evaluate` after training, by the prefix of the scores.

    A task's own rows, prefix "", are scored during training unless texts are generated.
    """
    further = {
        f"{name}/": [f"data.path={dataset.path}", *options]
        for name, dataset in datasets.items()
        if name
    }
    return {"": options, **further} if after_training else further


def _derived(config: TaskConfig, training: Tree, examples: int) -> Tree:
    """Settings that follow from the number of examples; those that are set take precedence."""
    # Example: 100 examples, 3 epochs and batches of 16 make 19 steps; with warmup 0.1 the rate
    # rises for 1 of them, and 2 evaluations are 10 steps apart.
    steps = math.ceil(examples * config.epochs / training["global_batch_size"])
    steps = training.get("steps", steps)
    derived: Tree = {"steps": steps, "evaluate_every": math.ceil(steps / config.evaluations)}
    # A run that is evaluated once, at its end, has no better checkpoint to keep.
    if config.evaluations > 1:
        best = {"metric": config.score, "mode": "max", "patience": config.patience}
        derived["best"] = best
    tree: Tree = {"training": derived, "schedule": {"warmup_steps": int(config.warmup * steps)}}
    if examples < 10 * DataConfig.lanes:
        # A lane of 4 rows is read 5 times while one of 5 rows is read 4 times.
        tree["data"] = {"lanes": 1}
    return tree


def _unfreezing(config: TaskConfig, tree: Tree, examples: int) -> Tree:
    """Sets the steps that follow from `unfreeze_epochs`, unless they are set."""
    if config.unfreeze_epochs is None or _has(tree, "optimizer.unfreeze_every"):
        return tree
    every = round(config.unfreeze_epochs * examples / tree["training"]["global_batch_size"])
    return merge(tree, {"optimizer": {"unfreeze_every": max(1, every)}})


def _has(tree: Tree, name: str) -> bool:
    """Whether a tree has a dotted setting, such as training.best."""
    for key in name.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _dataset(
    task: Task,
    name: str,
    source: SourceConfig,
    tokenizer: Path,
    folder: Path,
) -> Dataset:
    """The dataset of a source, built if it is missing; a digest of its settings names its folder.

    Args:
        name: of further held-out rows; "" for the task's own rows.
    """
    config = BuildConfig(
        source,
        TokenizerConfig(str(tokenizer)),
        output="",
        content_tokens=task.config.content_tokens,
        heldout_fraction=task.config.heldout_fraction,
        rows=None if name else task.config.rows,
        on_error=task.config.on_error,
    )
    tree = to_tree(config)
    depends_on = [
        tree["source"],
        tree["heldout_fraction"],
        tree["on_error"],
        Tokenizer.load(tokenizer).with_content(task.config.content_tokens).fingerprint,
        *stamps(source),
        *([] if config.rows is None else [config.rows]),
    ]
    digest = json_hash(depends_on)[:8]
    parts = [task.name, name, digest] if name else [task.name, digest]
    output = folder / "data" / "-".join(parts)
    if not (output / MANIFEST).exists():
        build(replace(config, output=str(output)))
    return Dataset.open(output)
