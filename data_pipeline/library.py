"""From text to a dataset: the functions behind `samestep data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_pipeline.reading.dataset import Dataset
    from data_pipeline.tokenizers.tokenizer import Tokenizer


def train_tokenizer(
    file: str | Path, overrides: Sequence[str] = (), force: bool = False
) -> Tokenizer:
    """Trains the tokenizer of a dataset on its source, and saves it at `tokenizer.path`.

    Args:
        file: the dataset's recipe, as in configs/data.
        overrides: settings that replace the file's, as "tokenizer.vocab_size=8192".
        force: replaces an existing tokenizer.

    Raises:
        ConfigError, DataError: the recipe or the text is wrong, or there is a tokenizer already.
    """
    from data_pipeline.building import tokenizer_training
    from data_pipeline.building.recipe import load_recipe

    return tokenizer_training.train_tokenizer(load_recipe(str(file), overrides), force)


def build_dataset(file: str | Path, overrides: Sequence[str] = (), force: bool = False) -> Dataset:
    """Builds a dataset from its recipe, or resumes a build that was stopped, and opens it.

    Args:
        file, overrides: as for `train_tokenizer`.
        force: replaces a finished dataset of other settings.

    Raises:
        ConfigError, DataError: the recipe or the text is wrong, or there is no tokenizer.
    """
    from data_pipeline.building.build import build
    from data_pipeline.building.recipe import load_recipe

    config = load_recipe(str(file), overrides)
    build(config, force)
    return open_dataset(config.output)


def open_dataset(path: str | Path) -> Dataset:
    """Opens a built dataset: its `manifest` counts documents and tokens, and it has a `tokenizer`.

    Args:
        path: its folder, or its address on an object store or web server.

    Raises:
        DataError: there is none, or it is unfinished or damaged.
    """
    from data_pipeline.reading.dataset import Dataset

    return Dataset.open(path)
