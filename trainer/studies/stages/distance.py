"""Measures how far the weights of a run have moved, by `samestep checkpoint distance`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Tree
from trainer.studies.stages import StageConfig


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """A distance between two checkpoints, for each layer.

    Attributes:
        start: the weights before, as stage:pretrain.
        run: the weights after, as stage:mrpc.
    """

    start: str
    run: str

    random = False
    product = "scores.json"

    def resolved(self) -> Tree:
        return {"start": self.start, "run": self.run}

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        file = str(folder / self.product)
        checkpoints = [settings["start"], settings["run"]]
        return [["checkpoint", "distance", *checkpoints, "--scores", file]]

    def scores(self, folder: Path) -> Mapping[str, float]:
        scores: dict[str, float] = json.loads((folder / self.product).read_text(encoding="utf-8"))
        return scores
