"""Imports of a user's own modules, which lie in the working folder: dotted kinds name them.

The folder is not on `sys.path`: a folder `trainer` in it would hide samestep's own, which in an
editable install is found by a finder that comes after `sys.path`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


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
