"""Asks a language model for missing words, by `samestep fill --probes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.config import Tree
from trainer.studies.finetune.suite import PREDICTIONS
from trainer.studies.inputs import stamp, stamps_of_weights
from trainer.studies.stages import ScoringConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScoringConfig):
    """Cloze probes; the scores are `accuracy`, and `accuracy.GROUP` for each group of probes.

    Attributes:
        run: a masked or left-to-right language model, as stage:pretrain.
        probes: file of probes: JSON Lines with text, candidates, label and perhaps group.
    """

    run: str
    probes: str

    def resolved(self) -> Tree:
        return {"run": self.run}

    def inputs(self, resolved: Tree) -> Sequence[object]:
        return [stamp(Path(self.probes)), *stamps_of_weights(self.run)]

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        files = ["--scores", str(folder / self.product)]
        files += ["--predictions", str(folder / PREDICTIONS)]
        return [["fill", settings["run"], "--probes", self.probes, *files]]

    def predictions(self, folder: Path) -> Path | None:
        return folder / PREDICTIONS
