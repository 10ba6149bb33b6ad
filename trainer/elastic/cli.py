"""The command `samestep train`, and helpers of all commands that start processes."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from samestep import environment
from samestep.command import OVERRIDES, Commands, add_command, add_processes
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from trainer import accelerators


def register(commands: Commands) -> None:
    """Adds `train` to the `samestep` command."""
    train = add_command(
        commands,
        "train",
        _train,
        "train a model, or continue the run found in its output folder",
        "example:\n  samestep train configs/debug/bert_mini.yaml --processes 2 training.steps=1000",
    )
    train.add_argument("file", metavar="EXPERIMENT", help="the experiment, a YAML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    add_processes(train)
    train.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="when processes or machines die, continue from the newest checkpoint with the "
        "remaining machines (MIN or more), and let others join, up to MAX; N is N:N, 1:1 this "
        "machine alone. Run the same command on each machine",
    )
    train.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where the machines of --elastic find each other: one of them, and a free port there "
        "(default: this machine alone)",
    )


def _train(args: argparse.Namespace) -> int:
    from trainer.training.starting import load_experiment

    experiment = load_experiment(args.file, args.overrides)
    if args.rendezvous and not args.elastic:
        raise ConfigError(
            "--rendezvous is for the machines of an elastic run; add --elastic MIN:MAX"
        )
    snapshots = experiment.checkpoint.snapshot_every is not None
    elastic = None
    if args.elastic:
        from trainer.elastic import agent
        from trainer.training.compose import checkpoint_folder
        from trainer.training.shared_facts import facts_of

        folder = checkpoint_folder(experiment)
        facts = partial(facts_of, experiment, folder)
        elastic = agent.Elastic.parse(args.elastic, args.rendezvous, snapshots, folder, facts)
    processes = processes_to_start(args, experiment.accelerator)
    if processes > 1 or (processes and elastic):
        from samestep.cli import main
        from trainer.elastic import agent

        signals = experiment.training.preemption.numbers
        return agent.run_workers(
            main, worker_arguments(args, "train", args.file), processes, elastic, signals
        )
    from trainer.training.run import train

    return train(experiment)


def processes_to_start(args: argparse.Namespace, accelerator: accelerators.Config | None) -> int:
    """Number of processes to start; 0 if this is one of the processes of a launcher.

    Args:
        accelerator: of the experiment; None: one process for each GPU.
    """
    from trainer.accelerators import detect

    if environment.launcher_rank() is not None:
        return 0
    processes: int = (
        len(detect.processes(accelerator)) if args.processes is None else args.processes
    )
    if processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {processes}")
    return processes


def worker_arguments(args: argparse.Namespace, *arguments: str) -> list[str]:
    """Returns the command line of a worker: `arguments`, and the user's further flags."""
    flags = [flag for flag in ("--traceback", "--verbose") if getattr(args, flag[2:])]
    return [*flags, *arguments, *args.overrides]
