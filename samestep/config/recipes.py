"""Recipes that come with samestep: files of `configs/` by name, as `recipes/pretrain/bert_base`."""

from __future__ import annotations

import difflib
from pathlib import Path, PurePath

PREFIX = "recipes"
_PREFIXES = (PREFIX, "configs")  # of a checkout: the documentation's commands work everywhere
_PACKAGE = Path(__file__).parents[1]
# The wheel maps configs/ into the package. A checkout, also an editable install, has it beside.
_INSTALLED = _PACKAGE / "recipes"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
    """Names of all recipes, sorted by folder, as recipes/pretrain/bert_base."""
    inside = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.yaml")]
    inside.sort(key=lambda path: (path.parent, path.name))  # a folder's files, then its folders
    return [f"{PREFIX}/{path.with_suffix('').as_posix()}" for path in inside]


def packaged(name: str | Path) -> Path | None:
    """The file or folder of a recipe's name, with or without .yaml; None if nothing has it."""
    head, *inside = PurePath(name).parts or ("",)
    if head not in _PREFIXES or ".." in inside:
        return None
    place = FOLDER.joinpath(*inside).resolve()
    file = place.with_name(f"{place.name}.yaml")
    return next((path for path in (place, file) if path.exists()), None)


def locate(name: str | Path, folder: Path | None = None) -> Path:
    """The path of a file, or of the recipe with this name if there is no such file.

    Args:
        folder: where relative paths start; None is the working folder.

    Returns:
        An absolute path, which does not exist if nothing has that name.
    """
    path = ((folder or Path.cwd()) / name).resolve()
    if path.is_file() or PurePath(name).parts[:1] not in [(prefix,) for prefix in _PREFIXES]:
        return path
    local = path.with_name(f"{path.name}.yaml")
    # A local folder recipes/ hides none of the recipes that it has no file of.
    return local if local.is_file() else packaged(name) or path


def name_of(file: Path) -> str | None:
    """The name of a recipe's file; None for other files."""
    folder, file = FOLDER.resolve(), file.resolve()
    if file.suffix != ".yaml" or not file.is_relative_to(folder):
        return None
    return f"{PREFIX}/{file.relative_to(folder).with_suffix('').as_posix()}"


def suggestion(name: str | Path) -> str:
    """A sentence that names the recipe that was probably meant; empty if none is similar."""
    if packaged(name) is not None:  # a folder
        return " It is a folder: `samestep recipes` lists the recipes in it."
    # bert_base, pretrain/bert_base, configs/pretrain/bert_base.yaml: compare the ends first.
    parts = PurePath(name).parts
    inside = [part for part in parts if part not in _PREFIXES]
    wanted = "/".join(inside).removesuffix(".yaml").removesuffix(".yml")
    by_end = {each: each for each in names()}
    for each in by_end.copy():
        _, _, inner = each.partition("/")
        by_end.setdefault(inner, each)
        by_end.setdefault(inner.rpartition("/")[2], each)
    close = difflib.get_close_matches(wanted, by_end, n=1, cutoff=0.75) if wanted else []
    if not close and parts[:1] != (PREFIX,):
        return ""
    meant = f" Did you mean {by_end[close[0]]}?" if close else ""
    return f"{meant} `samestep recipes` lists the recipes."
