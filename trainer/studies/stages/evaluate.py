"""Scores a run on its held-out split with other settings, by `samestep evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep.config import Tree
from samestep.errors import ConfigError
from trainer.studies.finetune.suite import PREDICTIONS
from trainer.studies.inputs import stamps_of_experiment, stamps_of_weights
from trainer.studies.stages import ScoringConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScoringConfig):
    """An evaluation.

    Attributes:
        run: to evaluate, as stage:pretrain.
        settings: that replace the run's, as objective.mask_fraction.
        encoder: a checkpoint that all parameters but the heads are taken from, as stage:mrpc, to
            see how much fine-tuning has forgotten; null keeps the run's.
        ensemble: further runs of the same task. Their predictions are combined with the run's.
        keep_predictions: of a task, keep the predictions of each row, so that intervals include
            the choice of rows.
        metrics: of a text-to-text task, as accuracy: texts are generated and scored, where an
            ensemble averages the logits of each token. Empty scores the objective.
        generate: settings of this, as max_new_tokens or beams.
    """

    run: str
    settings: Tree = field(default_factory=dict)
    encoder: str | None = None
    ensemble: tuple[str, ...] = ()
    keep_predictions: bool = False
    metrics: tuple[str, ...] = ()
    generate: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics and (self.encoder is not None or self.keep_predictions):
            raise ConfigError(
                f"metrics is {list(self.metrics)}, which generates texts. Leave encoder and "
                "keep_predictions out."
            )
        if self.generate and not self.metrics:
            raise ConfigError("generate needs metrics, as [accuracy]. Add them, or leave it out.")

    def resolved(self) -> Tree:
        tree: Tree = {"run": self.run, "settings": self.settings}
        # Without these, the digest of an evaluation is the one that it had before they existed.
        options = {
            "encoder": self.encoder,
            "ensemble": list(self.ensemble),
            "keep_predictions": self.keep_predictions,
            "metrics": list(self.metrics),
            "generate": self.generate,
        }
        return tree | {name: value for name, value in options.items() if value}

    def inputs(self, resolved: Tree) -> Sequence[object]:
        weights = stamps_of_weights(self.run, self.encoder, *self.ensemble)
        return weights + stamps_of_experiment(self.settings)

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        options = ["--scores", str(folder / self.product), "--processes", "1"]
        if self.encoder is not None:
            options += ["--encoder", settings["encoder"]]
        for run in settings.get("ensemble", ()):
            options += ["--ensemble", run]
        if self.keep_predictions:
            file = folder / PREDICTIONS
            file.unlink(missing_ok=True)  # of an attempt that was stopped
            options += ["--predictions", str(file)]
        if self.metrics:
            options += ["--generate", *overrides(self.generate), "--metrics", *self.metrics]
        return [["evaluate", settings["run"], *overrides(settings["settings"]), *options]]

    def predictions(self, folder: Path) -> Path | None:
        file = folder / PREDICTIONS
        return file if file.exists() else None


def overrides(tree: Tree, path: str = "") -> Iterator[str]:
    """Yields a tree of settings as arguments of a command: {a: {b: 1}} is a.b=1."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from overrides(value, f"{path}{key}.")
        else:
            yield f"{path}{key}={json.dumps(value)}"
