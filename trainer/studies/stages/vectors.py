"""Trains word vectors on a dataset, by `samestep vectors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer.config import Tree
from trainer.studies.stages import StageConfig


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """Vectors of the tokens of a dataset, for `init_embeddings` of a task.

    Attributes:
        dataset: whose text they are trained on, as stage:corpus.
        method: skipgram, cbow, glove or ppmi.
        options: of the command, by name, as dimensions.
    """

    dataset: str
    method: Literal["skipgram", "cbow", "glove", "ppmi"]
    options: Tree = field(default_factory=dict)

    product = "vectors"

    def resolved(self) -> Tree:
        return {"dataset": self.dataset, "method": self.method, "options": self.options}

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        fixed = ["--method", self.method, "--units", "tokens", "--seed", str(seed)]
        output = ["--workers", "1", "--output", str(folder / self.product)]
        return [["vectors", settings["dataset"], *fixed, *options, *output]]

    def scores(self, folder: Path) -> Mapping[str, float]:
        return {}
