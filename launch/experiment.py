"""Settings that a launch reads in an experiment's or dataset's file before they are checked.

Sections may have any type here: `samestep config` and `samestep data build --check` reject invalid
ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from samestep.config import Tree

_COMPONENTS = ("model", "objective", "optimizer", "strategy", "accelerator", "source")
# Settings of sources that name files.
_FILES = ("paths", "heldout", "source_paths", "target_paths")
# Strategies whose setting `config` names a file.
_WITH_FILE = ("accelerate", "deepspeed")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def kind_of(tree: Tree, section: str) -> str | None:
    """The kind of a component, written as `section: KIND` or `section: {kind: KIND}`."""
    value = tree.get(section)
    kind = value.get("kind") if isinstance(value, dict) else value
    return kind if isinstance(kind, str) else None


def inputs(tree: Tree) -> dict[str, str]:
    """Paths and URLs that a run or build reads, by setting; ~ is this user's home folder."""
    data, source, tokenizer = (_mapping(tree, key) for key in ("data", "source", "tokenizer"))
    found: dict[str, object] = {
        "init_from": tree.get("init_from"),
        "init_embeddings": tree.get("init_embeddings"),
        "tokenizer.path": tokenizer.get("path"),
        "data.path": data.get("path"),
    }
    if kind_of(tree, "strategy") in _WITH_FILE:
        found["strategy.config"] = _mapping(tree, "strategy").get("config")
    retrieval = _mapping(_mapping(tree, "training"), "retrieval")
    found["training.retrieval.path"] = retrieval.get("path")
    for name, probe in _mapping(tree, "probes").items():
        if isinstance(probe, dict):
            found[f"probes.{name}.path"] = probe.get("path")
    for prefix, phase in _with_phases(tree):
        found[f"{prefix}objective.teacher"] = _mapping(phase, "objective").get("teacher")
    for index, part in enumerate(_items(data.get("sources"))):
        if isinstance(part, dict):
            found[f"data.sources.{index}.path"] = part.get("path")
    for setting in _FILES:
        for index, path in enumerate(_items(source.get(setting))):
            found[f"source.{setting}.{index}"] = path
    # A dataset of Hugging Face is a repository, OWNER/NAME, unless it is written as a folder.
    for prefix, dataset in (("source", source), ("source.dataset", _mapping(source, "dataset"))):
        if str(dataset.get("path")).startswith(("/", ".", "~")):
            found[f"{prefix}.path"] = dataset["path"]
    return {
        setting: os.path.expanduser(path)
        for setting, path in found.items()
        if isinstance(path, str)
    }


def is_local(path: str) -> bool:
    """Whether a path is one of a file system, rather than a URL."""
    return "://" not in path


def checkpoints(tree: Tree) -> tuple[str, str]:
    """The setting that decides where checkpoints or shards are written, and the folder."""
    folder = _mapping(tree, "checkpoint").get("folder")
    if folder is None:
        return "output", str(tree.get("output"))
    return "checkpoint.folder", str(folder)


def own_modules(tree: Tree) -> dict[str, str]:
    """Modules outside this package, as my_package.my_objective, by the setting that names them."""
    kinds = {
        f"{prefix}{section}": kind_of(part, section)
        for prefix, part in _with_phases(tree)
        for section in _COMPONENTS
    }
    return {setting: kind for setting, kind in kinds.items() if kind and _MODULE.fullmatch(kind)}


def _with_phases(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """The experiment and each of its phases, with the beginning of its settings' names."""
    yield "", tree
    for index, phase in enumerate(_items(tree.get("phases"))):
        if isinstance(phase, dict):
            yield f"phases.{index}.", phase


def _mapping(tree: Tree, key: str) -> Tree:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def _items(value: object) -> Iterator[object]:
    return iter(value if isinstance(value, list) else ())
