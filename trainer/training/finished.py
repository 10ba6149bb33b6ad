"""A run that is found in its folder: whether it is finished, and its settings."""

from __future__ import annotations

import logging

from samestep.config import Tree, differences, to_tree
from samestep.config.tree import of_kinds
from samestep.errors import ConfigError
from trainer.training.checkpoints import stored_config
from trainer.training.experiment import Experiment
from trainer.training.state import Meta

logger = logging.getLogger(__name__)

_FREE = ("output", "tracking", "checkpoint", "strategy", "accelerator")
"""Sections that change no result."""


def check_origin(experiment: Experiment, meta: Meta) -> None:
    """Rejects a checkpoint of a custom training loop, whose optimizer is unknown here.

    Raises:
        ConfigError: says how to continue it.
    """
    if "state" not in meta:
        raise ConfigError(
            f"output={experiment.output} holds step {meta['step']} of a custom training loop, and "
            "only such a loop (open_parts) continues it. Start that program again, or set output "
            f"to a new folder and init_from={experiment.output}"
        )


def reason_to_end(experiment: Experiment, meta: Meta) -> str | None:
    """Says why nothing is left to do after a checkpoint, and what to change; None if there is."""
    step = meta["step"]
    if step >= experiment.training.steps:
        more = "add a phase" if experiment.phases else "raise training.steps"
        return f"is at step {step}; {more} to train on"
    if experiment.training.best is None:
        return None
    from trainer.training.observers.best import BestEvaluation

    best = BestEvaluation(experiment.training.best)
    best.load_state_dict(meta)
    if best.ends_run:
        return f"was stopped early at step {step}; raise training.best.patience to train on"
    return None


def check_settings(experiment: Experiment, meta: Meta) -> None:
    """Rejects other settings than those that a run with nothing left to do was trained with.

    Where it would run and report does not matter: that changes no result.

    Raises:
        ConfigError: lists the differences, and says whether the run was finished without them.
    """
    stored = stored_config(meta)
    changes = of_kinds(differences(stored, to_tree(experiment)))
    listed = ", ".join(
        f"{key}: {old} -> {new}"
        for key, (old, new) in changes.items()
        if key.partition(".")[0] not in _FREE
    )
    if not listed:
        return
    if not _had_ended(meta, stored):
        step, steps = meta["step"], stored["training"]["steps"]
        raise ConfigError(
            f"{experiment.output} is at step {step} of {steps}, and with other settings ({listed}) "
            "nothing is left to train. Use its settings to continue it, or set output to a new "
            "folder"
        )
    raise ConfigError(
        f"{experiment.output} is finished, and was trained with other settings ({listed}). "
        "Set output to a new folder, or use its settings"
    )


def _had_ended(meta: Meta, stored: Tree) -> bool:
    """Whether a run had ended at a checkpoint by the settings in that checkpoint.

    Args:
        stored: the result of `stored_config`.
    """
    settings = stored["training"]
    patience = (settings.get("best") or {}).get("patience")
    early: bool = patience is not None and meta["best"]["since"] >= patience
    return early or meta["step"] >= settings["steps"]
