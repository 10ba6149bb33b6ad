"""Scores a run on its held-out split with other settings, by `samestep evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import Tree
from trainer.studies.stages import StageConfig


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """An evaluation.

    Attributes:
        run: to evaluate, as stage:pretrain.
        settings: that replace the run's, as objective.mask_fraction.
    """

    run: str
    settings: Tree = field(default_factory=dict)

    random = False
    product = "scores.json"

    def resolved(self) -> Tree:
        return {"run": self.run, "settings": self.settings}

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        changes = overrides(settings["settings"])
        file = str(folder / self.product)
        return [["evaluate", settings["run"], *changes, "--scores", file, "--processes", "1"]]

    def scores(self, folder: Path) -> Mapping[str, float]:
        scores: dict[str, float] = json.loads((folder / self.product).read_text(encoding="utf-8"))
        return scores


def overrides(tree: Tree, path: str = "") -> Iterator[str]:
    """Yields a tree of settings as arguments of a command: {a: {b: 1}} is a.b=1."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from overrides(value, f"{path}{key}.")
        else:
            yield f"{path}{key}={json.dumps(value)}"
