"""Reads the file of `samestep data build`: the recipe of a dataset, or a fine-tuning task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from data_pipeline.building.config import Config
from data_pipeline.sources import SourceConfig
from samestep.config import Kinds, decode, read_tree
from samestep.config.tree import merge_overrides
from samestep.errors import ConfigError

OF_RUNS = (
    "objective",
    "score",
    "epochs",
    "unfreeze_epochs",
    "warmup",
    "sequence_length",
    "metrics",
    "grid",
    "evaluations",
    "patience",
    "start",
    "published",
    "published_by",
    "published_model",
    "experiment",
    "also",
    "generation",
)
"""Settings of a task file that its dataset does not depend on."""


@dataclass(frozen=True)
class TaskData:
    """The settings of a task file that its dataset is built from.

    Attributes:
        source: the rows, held-out ones included.
        content_tokens: special tokens that are content; see `config.Config`.
        heldout_fraction: fraction of the rows that is held out, if the source names none.
        rows: number of rows to train on: the first ones; None means all.
        on_error: whether a bad row stops the build ("stop"), or is counted, listed and left out
            ("skip").
    """

    source: Annotated[SourceConfig, Kinds("data_pipeline.sources.kinds")]
    content_tokens: tuple[str, ...] = ()
    heldout_fraction: float = 0.1
    rows: int | None = None
    on_error: Literal["stop", "skip"] = "stop"


def load_recipe(path: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a dataset's recipe, as in configs/data, or a task file, as in configs/tasks.

    A task file names no tokenizer, since any model can use it, and no output.

    Raises:
        ConfigError: a setting is unknown or wrong, an override drops another, or a task gets no
            tokenizer or no output.
    """
    tree = read_tree(path)
    is_task = "objective" in tree and "training" not in tree  # which an experiment has
    if is_task:
        tree = {name: value for name, value in tree.items() if name not in OF_RUNS}
        # Tasks are small: 0.005 of their rows, a dataset's default, would be too few to score.
        tree = {"heldout_fraction": TaskData.heldout_fraction, **tree}
    # Applied after the settings of runs are gone: one of these in an override is a mistake.
    tree = merge_overrides(tree, overrides)
    if is_task and not {"tokenizer", "output"} <= tree.keys():
        raise ConfigError(
            f"{path} is a task file, which names no tokenizer and no output. Add "
            "tokenizer.path=FOLDER, the tokenizer of the model to fine-tune, and output=FOLDER."
        )
    config: Config = decode(Config, tree)
    return config
