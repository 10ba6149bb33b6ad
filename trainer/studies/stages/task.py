"""Fine-tunes a checkpoint on a task, by `samestep finetune-suite`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from samestep.config import Tree, read_tree
from samestep.config.tree import merge
from samestep.errors import ConfigError, DataError
from samestep.storage import write_text
from trainer.checkpoint.integrity import committed_steps, step_folder
from trainer.studies.finetune.suite import PREDICTIONS, read_results
from trainer.studies.inputs import stamps_of, stamps_of_experiment, stamps_of_weights
from trainer.studies.size import sizes
from trainer.studies.stages import StageConfig


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """A fine-tuning run.

    Attributes:
        task: file of the task.
        start: the checkpoint, as stage:pretrain.
        at: share of the steps of `start` after which the checkpoint was saved, as 0.25; 1 is its
            end. The run must have kept it (`checkpoint.keep_every`).
        scratch: start from random weights of the checkpoint's architecture instead.
        settings: that replace the task file's, as epochs or experiment.model.dropout.
    """

    task: str
    start: str
    at: float = 1.0
    scratch: bool = False
    settings: Tree = field(default_factory=dict)

    product = "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.at <= 1:
            raise ConfigError(
                f"at is {self.at}. Use a fraction above 0 and at most 1, such as 0.25."
            )

    def resolved(self) -> Tree:
        tree = merge(read_tree(self.task), self.settings)
        tree = {name: value for name, value in tree.items() if not name.startswith("published")}
        found = {"task": tree, "start": self.start, "scratch": self.scratch}
        return found if self.at == 1 else {**found, "at": self.at}

    def inputs(self, resolved: Tree) -> Sequence[object]:
        task = resolved["task"]
        # A teacher is named in the task's objective, vectors in its experiment.
        read = stamps_of_experiment({**(task.get("experiment") or {}), **task})
        return stamps_of(task) + stamps_of_weights(self.start) + read

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        file = folder / f"{Path(self.task).stem}.yaml"
        write_text(file, yaml.safe_dump(settings["task"], sort_keys=False))
        chosen = ["--seeds", "1", "--first-seed", str(seed), "--parallel", "1"]
        chosen += ["--scratch-only"] * self.scratch
        suite = ["--output", str(folder / "suite")]
        start = _checkpoint(settings["start"], self.at)
        return [["finetune-suite", start, "--tasks", str(file), *chosen, *suite]]

    def finish(self, folder: Path) -> None:
        # The run's folder is named by a digest that only the suite knows. One that has failed under
        # an older version may be there, too.
        *_, digest = read_results(folder / "suite")
        (run,) = (folder / "suite").glob(f"runs/*/*-{digest[:8]}/")
        link = folder / self.product
        link.unlink(missing_ok=True)
        link.symlink_to(run.relative_to(folder), target_is_directory=True)

    def scores(self, folder: Path) -> Mapping[str, float]:
        *_, result = read_results(folder / "suite").values()
        learned = float(result.learned)
        return {**result.scores, "learned": learned, **sizes(folder / self.product)}

    def predictions(self, folder: Path) -> Path | None:
        file = folder / self.product / PREDICTIONS
        return file if file.exists() else None


def _checkpoint(start: str, share: float) -> str:
    """The checkpoint of a run after a share of its steps."""
    if share == 1:
        return start
    root = Path(start) / "checkpoints"
    steps = committed_steps(root)
    step = round(share * max(steps, default=0))
    if step not in steps:
        raise DataError(
            f"{start} has no checkpoint of step {step}, which `at: {share}` needs. Set "
            "checkpoint.every and checkpoint.keep_every of that run to a divisor of it."
        )
    return str(step_folder(root, step))
