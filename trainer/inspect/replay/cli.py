"""The commands `samestep replay` and `samestep diff`."""

from __future__ import annotations

import argparse
import json
import sys

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError


def register(commands: Commands) -> None:
    """Adds `replay` to the `samestep` command."""
    parser = add_command(
        commands,
        "replay",
        _replay,
        "recompute a step of a run and rank its examples by loss",
        "example:\n  samestep replay runs/bert_mini 600 --top 20",
        "Recomputes the global batch of a step, bit for bit, in one process on the CPU, compares "
        "it with the run's ledger, and ranks its examples by their loss under the newest "
        "checkpoint before the step.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="the output folder of a run")
    parser.add_argument(
        "step",
        metavar="STEP",
        type=int,
        help="step number, from 1; it may be later than the run has reached",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="train from the checkpoint up to STEP first, to have its very weights",
    )
    parser.add_argument(
        "--skipped",
        action="store_true",
        help="replay the batch as it was before its examples were skipped",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="K", help="examples to print (default: 10)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with all examples"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the run's, e.g. data.path=DIR",
    )


def register_diff(commands: Commands) -> None:
    """Adds `diff` to the `samestep` command."""
    parser = add_command(
        commands,
        "diff",
        _diff,
        "find the first step and tensor in which two runs differ",
        "example:\n  samestep diff runs/one runs/other",
        "Compares the digests that two runs have written (training.digest_every). Where they are "
        "bitwise (training.exact), recomputes the steps before the first difference in one "
        "process, to name the tensor, and the run that had a fault. Exits with 1 if the runs "
        "differ.",
    )
    for name in ("one", "other"):
        parser.add_argument(name, metavar="RUN", help="the output folder of a run")
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        metavar="N",
        help="maximum number of steps to recompute of each run (default: 100; 0: none)",
    )


def _diff(args: argparse.Namespace) -> int:
    from samestep.terminal import Console
    from trainer.inspect.replay.diff import diff, report

    if args.steps < 0:
        raise ConfigError(f"--steps is {args.steps}. Use 0 or more.")
    folders = [args.one, args.other]
    found = diff(folders, args.steps)
    report(found, folders, Console(highlight=False, markup=False, soft_wrap=True))
    return EXIT_DONE if found.difference is None else EXIT_FAILED


def _replay(args: argparse.Namespace) -> int:
    from samestep.terminal import Console
    from trainer.inspect.replay.step import replay, report

    for name, value in (("STEP", args.step), ("--top", args.top)):
        if value < 1:
            raise ConfigError(f"{name} is {value}. Use 1 or more.")
    found = replay(
        args.run_folder, args.step, args.overrides, exact=args.exact, skipped=args.skipped
    )
    if args.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        report(found, args.top, Console(highlight=False, markup=False, soft_wrap=True))
    return EXIT_DONE
