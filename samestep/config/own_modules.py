"""Imports of a user's own modules, which lie in the working folder: dotted kinds name them.

The folder is not on `sys.path`: a folder `trainer` in it would hide samestep's own, which in an
editable install is found by a finder that comes after `sys.path`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
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
