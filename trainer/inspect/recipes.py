"""Recipes that come with samestep: a list with summaries, and copies that stay valid."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from samestep.config import recipes
from samestep.errors import ConfigError

_STAGE_FILE = re.compile(r'(\b(?:recipe|experiment|task|probes): "?)([\w{}./-]+\.(?:yaml|jsonl))')
"""`recipe: "scales/{scale}/corpus.yaml"` and the like: a file by its place beside the study."""


def listing() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each folder with its recipes: name, and first sentence of the leading comment."""
    for folder, names in itertools.groupby(recipes.names(), lambda name: name.rpartition("/")[0]):
        yield folder, [(name, _summary(file_of(name))) for name in names]


def _summary(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    # Up to the commands, which are indented.
    lines = itertools.takewhile(re.compile("# ?[^ ]").match, text.splitlines())
    comment = " ".join(line.lstrip("#").strip() for line in lines)
    # "Devlin et al. 2019" does not end a sentence.
    return re.split(r"(?<!\bal)\.(?:\s|$)", comment, maxsplit=1)[0]


def file_of(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    # A local file needs no command to print or copy it, so this takes recipes only.
    file = recipes.packaged(name) or recipes.packaged(f"{recipes.PREFIX}/{name}")
    if file is None or not file.is_file():
        hint = recipes.suggestion(name) or " `samestep recipes` lists the recipes."
        raise ConfigError(f"there is no recipe {name!r}.{hint}")
    return file


def copy(name: str, folder: Path) -> Path:
    """Copies a recipe into a folder, which is created if missing; returns the new file.

    Raises:
        ConfigError: there is no such recipe, or the folder has a file of its name.
    """
    source = file_of(name)
    target = folder / source.name
    if folder.suffix in (".yaml", ".yml") and not folder.is_dir():
        raise ConfigError(f"DIR is {folder}, the name of a file. Name the folder of the copy.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(_with_named_files(source))
    except FileExistsError:
        raise ConfigError(
            f"{target} exists already. Remove it, or copy to another folder."
        ) from None
    return target


def _with_named_files(file: Path) -> str:
    """The text of a recipe, with its files by names of recipes, which are found from any folder.

    These are the recipes of `base:`, and the files of a study's stages.
    """
    folder = file.parent.relative_to(recipes.FOLDER.resolve())

    def stage_file(found: re.Match[str]) -> str:
        return found[1] + posixpath.normpath(f"{recipes.PREFIX}/{folder.as_posix()}/{found[2]}")

    def named(base: re.Match[str]) -> str:
        return recipes.name_of(recipes.locate(base[0], file.parent)) or base[0]

    def line(found: re.Match[str]) -> str:
        return "base:" + re.sub(r"[\w./-]+", named, found["bases"])

    text = _STAGE_FILE.sub(stage_file, file.read_text(encoding="utf-8"))
    # One name, or a list as [a, b].
    return re.sub(r"^base:(?P<bases>[\w./, \[\]-]+)$", line, text, flags=re.MULTILINE)
