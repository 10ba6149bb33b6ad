"""What tells whether files have changed, without reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from data_pipeline.sources import SourceConfig
from trainer.config import Kinds, Tree, decode, to_tree

_SOURCE = Annotated[SourceConfig, Kinds("data_pipeline.sources")]

Stamp = list[str | int]
"""Path, size and time of the last change of a file; of an address, only its name."""


def stamps(source: SourceConfig) -> list[Stamp]:
    """Returns a stamp for each file of a source."""
    files = [Path(file) for file in source.build().files]
    hub = to_tree(source).get("dataset")
    if hub and Path(hub["path"]).is_dir():  # a local copy of a dataset of the Hub
        files += sorted(Path(hub["path"]).rglob("*"))
    return [_stamp(file) for file in files]


def stamps_of(recipe: Tree) -> list[Stamp]:
    """Returns a stamp for each file of the source in a dataset's recipe or a task's file."""
    source: SourceConfig = decode(_SOURCE, recipe.get("source"), "source")
    tree = to_tree(source)
    paths = [*(tree.get("paths") or ()), *(tree.get("heldout") or ())]
    if paths and all("://" in path for path in paths):
        return []  # the settings have the addresses, and listing their files takes requests
    return stamps(source)


def _stamp(file: Path) -> Stamp:
    # Reading all rows for a hash would delay each start of a suite by minutes for a large task.
    if not file.is_file():
        return [str(file)]
    stat = file.stat()
    return [str(file), stat.st_size, stat.st_mtime_ns]
