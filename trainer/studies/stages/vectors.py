"""Trains word vectors on a dataset, by `samestep vectors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from samestep.config import Tree, decode
from samestep.errors import ConfigError
from trainer.studies.inputs import stamps_of_folders
from trainer.studies.stages import StageConfig
from trainer.vectors.settings import DEFAULTS, Settings


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """Vectors of the tokens of a dataset, for `init_embeddings` of a task.

    Attributes:
        dataset: the dataset with the training text, as stage:corpus.
        method: skipgram, cbow, glove or ppmi.
        options: of the command that are numbers, by name, as dimensions or min_count.
    """

    dataset: str
    method: Literal["skipgram", "cbow", "glove", "ppmi"]
    options: Tree = field(default_factory=dict)

    product = "vectors"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("method", "units", "seed"):
            if name in self.options:
                raise ConfigError(f"options.{name} is chosen by the study. Leave it out.")
        known = {"method": self.method, **DEFAULTS[self.method], **self.options}
        decode(Settings, known, "options")  # names and types
        Settings.of(self.method, dict(self.options))  # the method's own

    def inputs(self, resolved: Tree) -> Sequence[object]:
        return stamps_of_folders(self.dataset)

    def resolved(self) -> Tree:
        return {"dataset": self.dataset, "method": self.method, "options": self.options}

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        fixed = ["--method", self.method, "--units", "tokens", "--seed", str(seed)]
        output = ["--workers", "1", "--output", str(folder / self.product)]
        return [["vectors", settings["dataset"], *fixed, *options, *output]]

    def scores(self, folder: Path) -> Mapping[str, float]:
        return {}
