"""Writes what an image installs as three lists: requirements.txt, constraints.txt and torch.txt.

A layer of an image is made anew when a file that it is made from changes. pyproject.toml and the
constraints change often, and most changes concern an image's dependencies not at all, or the small
ones; torch's layer has gigabytes.

    python3 lists.py EXTRA,EXTRA,... CONSTRAINTS...

It runs in the base image, from the folder that holds pyproject.toml: standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

# The packages of torch's layer: torch and all that it needs.
TORCH = re.compile(
    r"torch|triton|cuda-.*|nvidia-.*|numpy|setuptools|"
    r"filelock|fsspec|jinja2|markupsafe|mpmath|networkx|sympy|typing-extensions"
)


def name(requirement: str) -> str:
    """The package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def requirements(extras: list[str]) -> list[str]:
    """What samestep needs with these extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            sys.exit(
                f"samestep has no extra {extra!r}; it has "
                f"{', '.join(project['optional-dependencies'])}"
            )
        needed += project["optional-dependencies"][extra]
    return needed


def constraints(files: list[str]) -> list[str]:
    """The pins of all files; of a package that several name, the first one's."""
    pins: dict[str, str] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if "==" in line and not line.startswith("#"):
                pins.setdefault(name(line), line)
    return sorted(pins.values(), key=name)


def main(extras: str, *files: str) -> None:
    pins = constraints(list(files))
    lists = {
        "requirements.txt": requirements([extra for extra in extras.split(",") if extra]),
        "constraints.txt": pins,
        "torch.txt": [pin for pin in pins if TORCH.fullmatch(name(pin))],
    }
    for file, lines in lists.items():
        Path(file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
