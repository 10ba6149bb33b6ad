"""Commands that run in several processes: their number, and the arguments of each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from samestep import environment
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from trainer.training.experiment import Experiment


def processes_to_start(args: argparse.Namespace, experiment: Experiment) -> int:
    """Number of processes to start; 0 if this is one of the processes of a launcher."""
    from trainer.accelerators import detect

    if environment.launcher_rank() is not None:
        return 0
    processes: int = (
        len(detect.processes(experiment.accelerator)) if args.processes is None else args.processes
    )
    if processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {processes}")
    return processes


def worker_arguments(args: argparse.Namespace, *arguments: str) -> list[str]:
    """Returns the command line of a worker: `arguments`, and the user's further flags."""
    flags = [flag for flag in ("--traceback", "--verbose") if getattr(args, flag[2:])]
    return [*flags, *arguments, *args.overrides]
