"""Adds the recipes of configs/ to the package; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies configs/ into a built package. An editable install reads it where it is."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "configs", Path(self.build_lib, "samestep", "recipes"), dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithRecipes})
