"""The command `samestep doctor`."""

from __future__ import annotations

import argparse

from samestep.command import OVERRIDES, Commands, add_command
from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError


def register(commands: Commands) -> None:
    """Adds `doctor` to the `samestep` command."""
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        "check devices, packages, disks and network of this machine, for a run",
        "example:\n  samestep doctor configs/pretrain/bert_base.yaml",
    )
    doctor.add_argument(
        "file",
        nargs="?",
        metavar="EXPERIMENT",
        help="the experiment to run here (default: the machine alone)",
    )
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    help_ = "processes of the all-reduce (default: one per GPU; two without GPUs)"
    doctor.add_argument("--processes", type=int, metavar="N", help=help_)


def _doctor(args: argparse.Namespace) -> int:
    from samestep import findings
    from samestep.terminal import Console
    from trainer.inspect.doctor import checks
    from trainer.training.starting import load_experiment

    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes must be at least 1, not {args.processes}")
    experiment = load_experiment(args.file, args.overrides, offline=True) if args.file else None
    passed = findings.report(checks.examine(experiment, args.processes), Console())
    return EXIT_DONE if passed else EXIT_FAILED
