"""Reading an experiment whose model is that of the weights it starts from: `model` without a `kind`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.mixed_dataset import named_sources
from trainer.checkpoint import files, integrity
from trainer.config import Kinds, Tree, decode, read_tree, to_tree
from trainer.config.renamed import read_stored
from trainer.config.tree import merge
from trainer.errors import ConfigError
from trainer.models import Model, ModelConfig
from trainer.models.config import FEWEST_LABELS
from trainer.storage import is_url
from trainer.training.experiment import Experiment
from trainer.training.weights import load_config

_OBJECTIVES = Kinds("trainer.objectives")
_MODELS = Kinds("trainer.models")


@dataclass(frozen=True)
class Config(ModelConfig):
    """Stands for a model that is known on other machines only: the one of `init_from`, with some
    settings changed.

    Attributes:
        changes: these settings.
    """

    changes: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Model:
        raise ConfigError("the model is that of init_from, which lies on another machine")


def load_experiment(
    path: str | Path, overrides: Sequence[str] = (), elsewhere: bool = False
) -> Experiment:
    """Reads an experiment; one with `init_from` may leave the model out, or name but the settings that change.

    The head is then the one that the objective is for, with an output for each label of the dataset. A run that has
    begun keeps the model it has.

    Args:
        path: of the file.
        overrides: settings that replace those of the file.
        elsewhere: whether folders are those of other machines; where such are needed to tell the model, it stays open.

    Raises:
        ConfigError: as for any configuration, or the model that it starts from has no such head.
        CheckpointError, DataError: these weights or the dataset cannot be read.
    """
    tree = read_tree(path, overrides)
    model = tree.get("model")
    if tree.get("init_from") and (
        model is None or (isinstance(model, dict) and "kind" not in model)
    ):
        begun = None if elsewhere else _begun(tree)
        data = decode(DataConfig, tree.get("data"), "data")
        if elsewhere and not all(map(is_url, (tree["init_from"], *data.paths))):
            stand_in: Experiment = decode(Experiment, {**tree, "model": {"kind": __name__}})
            return replace(stand_in, model=Config(model or {}))
        tree = {**tree, "model": merge(model_of(tree) if begun is None else begun, model or {})}
    experiment: Experiment = decode(Experiment, tree)
    return experiment


def _begun(tree: Tree) -> Tree | None:
    """The model of the run in the output folder, if there is one with a checkpoint to go on from."""
    output = Path(str(tree.get("output")))
    folder = (tree.get("checkpoint") or {}).get("folder") or output / "checkpoints"
    if not (output / "config.yaml").is_file() or not integrity.committed_steps(
        files.location(folder)
    ):
        return None
    return read_stored(output / "config.yaml").get("model")


def model_of(tree: Tree) -> Tree:
    """The model that an experiment starts from, with the head that its objective is for.

    Args:
        tree: the experiment's init_from, data and objective.

    Raises:
        ConfigError: the model has no such head.
        CheckpointError, DataError: the weights or the dataset cannot be read.
    """
    config = load_config(tree["init_from"])
    dataset = decode(DataConfig, tree.get("data"), "data").open()
    objective = decode(Annotated[Any, _OBJECTIVES], tree.get("objective"), "objective")
    needs = objective.build(dataset.tokenizer.vocabulary).needs
    tasks = [source.manifest.task for source in named_sources(dataset).values()]
    has_labels = not needs.isdisjoint(FEWEST_LABELS)
    own = config.for_needs(needs, tasks[0].labels if tasks[0] is not None and has_labels else ())
    return {"kind": _MODELS.kind_of(own), **to_tree(own)}
