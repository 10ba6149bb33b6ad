"""The runs of a suite: what each is to do, and what its result depends on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from data_pipeline import tokenization
from data_pipeline.build import Config as BuildConfig
from data_pipeline.build import build
from data_pipeline.dataset import Dataset, PackedSplit
from data_pipeline.tokenization import Tokenizer
from trainer.config import Kinds, Tree, decode, to_tree
from trainer.config.tree import merge, parse_override
from trainer.errors import ConfigError
from trainer.finetune.chance import chance
from trainer.finetune.task import Task
from trainer.weights import identity, load_weights

_OBJECTIVE = Annotated[Any, Kinds("trainer.objectives")]
_OWN = ("output", "init_from", "seed")  # settings that the suite makes itself
_DEFAULTS: Tree = {
    "training": {"global_batch_size": 32},
    "optimizer": {"kind": "adamw"},
    "strategy": {"kind": "single"},
}


@dataclass(frozen=True)
class Run:
    """One fine-tuning.

    Attributes:
        task: its name.
        settings: what the grid chose.
        seed: of the head's weights, the order of the rows and dropout.
        folder: where it goes.
        experiment: all its settings.
        digest: of all that its result depends on, but for the code.
        score: the metric that it is compared by.
        chance: what that is for a model that always says the same.
    """

    task: str
    settings: Mapping[str, float]
    seed: int
    folder: Path
    experiment: Tree
    digest: str
    score: str
    chance: float

    @property
    def name(self) -> str:
        """For a reader: what sets it apart from the task's other runs."""
        chosen = [f"{key.rpartition('.')[2]}-{value:g}" for key, value in self.settings.items()]
        return "-".join([*chosen, f"seed-{self.seed}"])


def list_runs(
    checkpoint: str, tasks: Sequence[Task], folder: Path, seeds: int, whole_grid: bool, overrides: Sequence[str]
) -> list[Run]:
    """Builds the datasets that are not there yet and lists the runs.

    Args:
        checkpoint: what they start from; see `load_weights`.
        tasks: what they are of.
        folder: of the suite.
        seeds: how many of them, from 0.
        whole_grid: whether every point of the tasks' grids is tried.
        overrides: settings of all runs, as on the command line; one that a grid has is not varied.

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
    weights = load_weights(checkpoint)
    runs = []
    with weights.tokenizer_files() as tokenizer:
        for task in tasks:
            dataset = _dataset(task, tokenizer, folder)
            start = [checkpoint, identity(weights), to_tree(weights.config), dataset.manifest.digest]
            runs += list(_runs_of(task, dataset, folder, start, seeds, whole_grid, changes))
    return runs


def _runs_of(
    task: Task, dataset: Dataset, folder: Path, start: list[Any], seeds: int, whole_grid: bool, changes: Tree
) -> Iterator[Run]:
    config = task.config
    own: Tree = {
        "objective": to_tree(config)["objective"],
        "data": {"sequence_length": config.sequence_length, "packing": "padded"},
    }
    grid = {name: values for name, values in config.grid.items() if not _has(changes, name)}
    grid = grid if whole_grid else {name: values[:1] for name, values in grid.items()}
    for point in itertools.product(*grid.values()):
        settings = dict(zip(grid, point, strict=True))
        tree = merge(merge(_DEFAULTS, task.experiment), own)
        for name, value in settings.items():
            tree = merge(tree, parse_override(f"{name}={value:g}"))
        tree = merge(tree, changes)
        objective = decode(_OBJECTIVE, tree["objective"], "objective").build(dataset.tokenizer.vocabulary)
        spec, policy = objective.pack_spec(tree["data"]["sequence_length"]), tree["data"]["packing"]
        examples = int(PackedSplit(dataset, "train", spec, policy, seed=0).counts.sum())
        steps = tree["training"].get(
            "steps", math.ceil(examples * config.epochs / tree["training"]["global_batch_size"])
        )
        by_steps: Tree = {
            "training": {"steps": steps, "evaluate_every": steps},
            "schedule": {"warmup_steps": int(config.warmup * steps)},
            "data": {"path": str(dataset.path)},
            "init_from": start[0],
        }
        baseline = chance(objective, dataset, config.score)
        for seed in range(seeds):
            experiment = merge(by_steps, {**tree, "seed": seed})
            content = json.dumps([experiment, *start], sort_keys=True)
            digest = hashlib.sha256(content.encode()).hexdigest()[:16]
            run = Run(task.name, settings, seed, folder, experiment, digest, config.score, baseline)
            place = folder / "runs" / task.name / f"{run.name}-{digest[:8]}"
            yield Run(**{**vars(run), "folder": place, "experiment": {"output": str(place), **experiment}})


def _has(tree: Tree, name: str) -> bool:
    for key in name.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _dataset(task: Task, tokenizer: Path, folder: Path) -> Dataset:
    """The task's dataset, in a folder that is named by all that it is made of."""
    config = BuildConfig(
        task.config.source,
        tokenization.Config(str(tokenizer)),
        output="",
        heldout_fraction=task.config.heldout_fraction,
        on_error=task.config.on_error,
    )
    tree = to_tree(config)
    made_of = [tree["source"], tree["heldout_fraction"], tree["on_error"], Tokenizer.load(tokenizer).fingerprint]
    made_of += [_stamp(Path(file)) for file in config.source.build().files]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:8]
    output = folder / "data" / f"{task.name}-{digest}"
    build(BuildConfig(**{**vars(config), "output": str(output)}))
    return Dataset.open(output)


def _stamp(file: Path) -> list[str | int]:
    """What changes with a file's content: name, size and time; of an address, the name alone."""
    if not file.is_file():
        return [str(file)]
    found = file.stat()
    return [str(file), found.st_size, found.st_mtime_ns]
