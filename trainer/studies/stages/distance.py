"""Measures how far the weights of a run have moved, by `samestep checkpoint distance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.config import Tree
from trainer.studies.inputs import stamps_of_weights
from trainer.studies.stages import ScoringConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScoringConfig):
    """A distance between two checkpoints, for each layer.

    Attributes:
        start: the weights before, as stage:pretrain.
        run: the weights after, as stage:mrpc.
    """

    start: str
    run: str

    def resolved(self) -> Tree:
        return {"start": self.start, "run": self.run}

    def inputs(self, resolved: Tree) -> Sequence[object]:
        return stamps_of_weights(self.start, self.run)

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        file = str(folder / self.product)
        checkpoints = [settings["start"], settings["run"]]
        return [["checkpoint", "distance", *checkpoints, "--scores", file]]
