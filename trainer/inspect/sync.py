"""The command `samestep sync`."""

from __future__ import annotations

import argparse
import sys

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError


def register(commands: Commands) -> None:
    """Adds `sync` to the `samestep` command."""
    sync = add_command(
        commands,
        "sync",
        _sync,
        "send TensorBoard and Weights & Biases the metrics of a run that they lack",
        "A run sends its metrics while it trains. If a full disk or a failed network has lost\n"
        "some, this command sends them from the run's metrics.jsonl, which has all. Steps\n"
        "that W&B has are skipped, so it may be repeated. It is refused while the run trains, and\n"
        "exits with 1 if something could not be sent.\n\n"
        "examples:\n  samestep sync runs/bert_mini\n"
        "  samestep sync runs/bert_mini tracking.wandb.project=bert    # if trained without W&B",
    )
    sync.add_argument("run_folder", metavar="RUN", help="the output folder of a run")
    help_ = "settings that override the run's, e.g. tracking.wandb.mode=online"
    sync.add_argument("overrides", nargs="*", metavar="key=value", help=help_)


def _sync(args: argparse.Namespace) -> int:
    from trainer.training import run_folder
    from trainer.training.compose import checkpoint_folder, only_writer_of
    from trainer.training.starting import stored_experiment

    experiment = stored_experiment(args.run_folder, args.overrides)
    tracking = experiment.tracking
    if tracking.tensorboard is None and tracking.wandb is None:
        raise ConfigError(
            "tracking.tensorboard and tracking.wandb are null. Name one of them, as in "
            "tracking.wandb.project=samestep"
        )
    with only_writer_of(experiment, rank=0):
        if not run_folder.sync(experiment, checkpoint_folder(experiment)):
            return EXIT_FAILED
    sys.stdout.write(f"all of {args.run_folder}/metrics.jsonl is sent\n")
    return EXIT_DONE
