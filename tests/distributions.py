"""Metadata of a Python distribution, as an installation leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]
) -> Path:
    """Writes the entry points of a distribution, by group; returns the folder for `sys.path`."""
    distribution = folder / f"{name}-0.dist-info"
    distribution.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
    (distribution / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {module}" for key, module in entries.items())]
    (distribution / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
