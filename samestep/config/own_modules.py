"""Imports of a user's own modules, which lie in the working folder: dotted kinds name them.

The folder is not on `sys.path`: a folder `trainer` in it would hide samestep's own, which in an
editable install is found by a finder that comes after `sys.path`.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from samestep.errors import ConfigError

logger = logging.getLogger(__name__)

_refusals: list[str] = []  # of the whole process: a live page is made in threads


class _FolderFinder(MetaPathFinder):
    """Finds the modules and packages of one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Python finds what is inside a package through the package.
        return PathFinder.find_spec(fullname, [self.folder]) if path is None else None


def make_importable(folder: str) -> None:
    """Lets this process import a folder's modules, except those that are found elsewhere."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _FolderFinder)]
    if all(finder.folder != folder for finder in finders):
        sys.meta_path.append(_FolderFinder(folder))  # after all others


@contextmanager
def refused(command: str) -> Iterator[None]:
    """Refuses imports of own modules by kinds, in a command that only looks at a folder.

    The folder may be a stranger's, and importing a module runs its code.

    Args:
        command: for the message.
    """
    _refusals.append(command)
    try:
        yield
    finally:
        _refusals.pop()


def announce(kind: str, path: str) -> None:
    """Says that a dotted kind is about to be imported, once for each module.

    Raises:
        ConfigError: the command is one that imports none.
    """
    if _refusals:
        raise ConfigError(
            f"{path}.kind is {kind}, a module of the author, and {_refusals[-1]} imports none. Use "
            "a command that needs the model, if you trust the author"
        )
    if kind not in sys.modules:
        logger.info("importing the module %s, which %s.kind names", kind, path)


def absent(name: str, kinds: Iterable[str]) -> str:
    """Says why a user's own module cannot be imported, and how it can be.

    Args:
        name: dotted name of the module.
        kinds: the kinds that samestep has, one of which may have been meant.
    """
    parts = name.split(".")
    # The innermost parent that can be imported tells a missing package from a misspelled module.
    folders, found = list(sys.path), ""
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        try:
            folders = list(importlib.import_module(parent).__path__)
        except (ImportError, AttributeError):  # a module that is no package has no path
            break
        found = parent
    if found:
        modules = [f"{found}.{module.name}" for module in pkgutil.iter_modules(folders)]
        close = difflib.get_close_matches(name, modules, n=1)
        reason = f"no module {name!r}: the package {found} in {', '.join(folders)} has none. "
        fix = f"Did you mean {close[0]}?" if close else _others(modules)
    else:
        reason = f"no module {name!r}: the package {parts[0]} is not installed. "
        fix = (
            "Install it (pip install -e FOLDER, where FOLDER has its pyproject.toml), or start "
            f"from the folder that contains {parts[0]}."
        )
    built_in = difflib.get_close_matches(parts[-1], list(kinds), n=1)
    return reason + fix + (f" samestep itself has {built_in[0]!r}." if built_in else "")


def _others(modules: list[str]) -> str:
    if not modules:
        return "Add the module."
    more = ", ..." if len(modules) > 5 else ""
    return f"Add the module, or name one of {', '.join(modules[:5])}{more}."
