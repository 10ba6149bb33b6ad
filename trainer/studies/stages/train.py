"""A run of `samestep train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from samestep.config import Tree, decode, read_tree
from samestep.config.tree import merge
from samestep.errors import ConfigError, SamestepError
from samestep.storage import write_text
from trainer.monitoring.jsonl import read_rows, scores_of
from trainer.studies.inputs import stamps_of_experiment
from trainer.studies.size import sizes
from trainer.studies.stages import StageConfig
from trainer.training.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """A run.

    Attributes:
        experiment: file of `samestep train`.
        settings: that replace the file's.
    """

    experiment: str
    settings: Tree = field(default_factory=dict)

    product = "run"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("output", "seed"):
            if name in self.settings:
                raise ConfigError(
                    f"settings.{name} is chosen by the study for each job. Leave it out"
                    + ("; a stage's own `seed` holds for all jobs." if name == "seed" else ".")
                )

    def resolved(self) -> Tree:
        tree = merge(read_tree(self.experiment), self.settings)
        return {name: value for name, value in tree.items() if name not in ("output", "seed")}

    def inputs(self, resolved: Tree) -> Sequence[object]:
        return stamps_of_experiment(resolved)

    def check(self, settings: Tree) -> None:
        if "init_from" not in settings:  # else the model is known only when the stage has run
            decode(Experiment, {"output": self.product, **settings})

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        file = folder / "experiment.yaml"
        tree = {"output": str(folder / self.product), "seed": seed, **settings}
        write_text(file, yaml.safe_dump(tree, sort_keys=False))
        return [["train", str(file), "--processes", "1"]]

    def scores(self, folder: Path) -> Mapping[str, float]:
        rows = list(read_rows(folder / self.product / "metrics.jsonl"))
        evaluated = [row for row in rows if any(name.startswith("heldout/") for name in row)]
        if not evaluated:
            raise SamestepError(f"{folder} has no evaluation. Set training.evaluate_every.")
        scores = scores_of(evaluated[-1], of_tokens=False)
        return {**scores, "steps": float(rows[-1]["step"]), **sizes(folder / self.product)}
