"""Reads an experiment. Without `model.kind`, the model is the one of `init_from`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.reading.concat_dataset import named_sources
from data_pipeline.reading.config import Config as DataConfig
from samestep.config import Kinds, Tree, decode, read_tree, to_tree
from samestep.config.tree import merge
from samestep.errors import ConfigError
from samestep.storage import is_url
from samestep.untrusted import read_stored
from trainer.checkpoint import files, integrity
from trainer.checkpoint.meta import newest_meta
from trainer.models import Model, ModelConfig
from trainer.models.config import FEWEST_LABELS
from trainer.training.compatibility import check_dataset
from trainer.training.experiment import Experiment

_OBJECTIVES = Kinds("trainer.objectives.kinds")
_MODELS = Kinds("trainer.models.families")


@dataclass(frozen=True)
class Config(ModelConfig):
    """Placeholder for the model of an `init_from` that only other machines can read.

    Attributes:
        changes: settings that differ from that model.
    """

    changes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Model:
        raise ConfigError("model comes from init_from, which is on another machine")


def load_experiment(
    path: str | Path,
    overrides: Sequence[str] = (),
    elsewhere: bool = False,
    offline: bool = False,
) -> Experiment:
    """Reads an experiment; one with `init_from` may leave out the model, or most of its settings.

    The model is then the one of `init_from`, with the head that the objective needs and an output
    for each label of the dataset. A run that has begun keeps the model it has.

    Args:
        overrides: settings that replace the file's.
        elsewhere: the run's folders are on other machines. If one of them is needed to find out
            the model, the experiment has a placeholder instead.
        offline: checkpoints in an object store are not asked for; the run has begun if there is a
            config.yaml in its output folder. Settings of pooling that come from an address stay
            null.

    Raises:
        ConfigError: the configuration is invalid, or init_from's model cannot have such a head.
        CheckpointError, DataError: the weights or the dataset cannot be read.
    """
    tree = read_tree(path, overrides)
    begun = {} if elsewhere else _run_before(tree, offline)
    tree = _with_dropout_of(begun, tree)
    model = tree.get("model")
    lacks_kind = model is None or (isinstance(model, dict) and "kind" not in model)
    if tree.get("init_from") and lacks_kind:
        changes = model or {}
        data = decode(DataConfig, tree.get("data"), "data")
        if elsewhere and not all(map(is_url, (tree["init_from"], *data.paths))):
            placeholder = decode(Experiment, {**tree, "model": {"kind": __name__}})
            return replace(placeholder, model=Config(changes))
        # The dataset's labels, or init_from, may have changed since the run began.
        tree = {**tree, "model": merge(begun.get("model") or model_of(tree), changes)}
    experiment: Experiment = decode(Experiment, tree)
    objectives = (experiment.objective, *(phase.objective for phase in experiment.phases))
    embeds = any(objective.embeds for objective in objectives if objective is not None)
    paths = experiment.init_from or "", experiment.objective.teacher_path or ""
    if embeds and not elsewhere and not (offline and any(map(is_url, paths))):
        from trainer.training.weights.pooling import with_pooling

        experiment = with_pooling(experiment, begun)
    return experiment


def _with_dropout_of(begun: Tree, tree: Tree) -> Tree:
    """A run that has begun keeps its dropout, unless the user names another version."""
    training, stored = tree.get("training"), begun.get("training")
    if not isinstance(training, dict) or not isinstance(stored, dict):
        return tree
    return {**tree, "training": {"dropout_version": stored["dropout_version"], **training}}


def _run_before(tree: Tree, offline: bool) -> Tree:
    """The settings of the run in the output folder, if it has a checkpoint; else {}."""
    output = Path(str(tree.get("output")))
    section = tree.get("checkpoint")
    given = section.get("folder") if isinstance(section, dict) else None
    location = files.location(given if isinstance(given, str) else output / "checkpoints")
    settings = output / "config.yaml"
    if offline and not isinstance(location, Path):
        return read_stored(settings) if settings.is_file() else {}
    if not integrity.committed_steps(location):
        return {}
    if settings.is_file():
        return read_stored(settings)
    # Checkpoints in an object store, on a new machine.
    stored: Tree = newest_meta(location).get("config", {})
    return stored


def stored_experiment(folder: str, overrides: Sequence[str] = ()) -> Experiment:
    """Reads the experiment of a run from its folder.

    Raises:
        ConfigError: the folder is no run, or a setting is invalid.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{folder} is not a run (it has no config.yaml). Name the output folder of a run."
        )
    experiment: Experiment = decode(Experiment, read_stored(file, overrides))
    # The folder may have been moved since the run was trained.
    return replace(experiment, output=folder)


def model_of(tree: Tree) -> Tree:
    """Returns the model of `init_from`, with the head that the objective needs.

    Args:
        tree: the experiment's init_from, data and objective.

    Raises:
        ConfigError: the model cannot have such a head.
        CheckpointError, DataError: the weights or the dataset cannot be read.
    """
    from trainer.training.weights.loading import load_config

    config = load_config(tree["init_from"])
    data = decode(DataConfig, tree.get("data"), "data")
    dataset = data.open()
    objective = decode(Annotated[Any, _OBJECTIVES], tree.get("objective"), "objective")
    built = objective.build(dataset.tokenizer.vocabulary)
    check_dataset(dataset, built, data.sequence_length)
    needs = built.needs
    labels: tuple[str, ...] = ()
    task = next(iter(named_sources(dataset).values())).manifest.task
    if task is not None and not needs.isdisjoint(FEWEST_LABELS):
        # A reranker has one score, whatever its name; rows of retrieval name none.
        labels = task.labels or (config.labels if len(config.labels) == 1 else ("score",))
    own = config.for_needs(needs, labels)
    return {"kind": _MODELS.kind_of(own), **to_tree(own)}
