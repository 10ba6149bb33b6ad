"""A run that is found finished: the reason, and the settings that it was trained with."""

from __future__ import annotations

from trainer.checkpoint import integrity
from trainer.checkpoint.manager import Checkpointer
from trainer.config import differences, to_tree
from trainer.config.tree import of_kinds
from trainer.errors import ConfigError
from trainer.training.best import Best
from trainer.training.experiment import Experiment

_FREE = ("output", "tracking", "checkpoint", "strategy", "accelerator")
"""Sections that change no result."""


def reason_to_end(experiment: Experiment, source: Checkpointer, step: int) -> str | None:
    """Says why nothing is left to do after a step, and what to change; None if there is."""
    if step >= experiment.training.steps:
        return f"is at step {step}; raise training.steps to train on"
    if experiment.training.best is None:
        return None
    best = Best(experiment.training.best)
    meta = integrity.read_meta(integrity.step_folder(source.folder, step))
    best.load_state_dict(meta, holds=lambda step: True)
    if best.out_of_patience:
        return f"was stopped early at step {step}; raise training.best.patience to train on"
    return None


def check_settings(experiment: Experiment, source: Checkpointer, step: int) -> None:
    """Rejects other settings than those that a finished run was trained with.

    Where it would run and report does not matter: that changes no result.

    Raises:
        ConfigError: lists the differences.
    """
    trained = integrity.read_meta(integrity.step_folder(source.folder, step))["config"]
    changes = of_kinds(differences(trained, to_tree(experiment)))
    listed = [
        f"{key}: {old} -> {new}"
        for key, (old, new) in changes.items()
        if key.partition(".")[0] not in _FREE
    ]
    if listed:
        raise ConfigError(
            f"{experiment.output} is finished, and was trained with other settings "
            f"({', '.join(listed)}). Set output to a new folder, or use its settings"
        )
