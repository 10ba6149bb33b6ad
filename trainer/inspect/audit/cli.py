"""The commands `samestep ledger verify` and `samestep ledger step`."""

from __future__ import annotations

import argparse
import json
import sys

from samestep.command import Commands, add_command, add_group
from samestep.errors import EXIT_DONE, EXIT_FAILED

_OVERRIDES = "settings that override the run's, e.g. data.path=DIR where the dataset has moved"


def register(commands: Commands) -> None:
    """Adds `ledger` and its sub-commands to the `samestep` command."""
    subcommands = add_group(
        commands, "ledger", "prove which examples a run has consumed, over all its restarts"
    )
    verify = add_command(
        subcommands,
        "verify",
        _verify,
        "recompute all batches of a run and compare them with what it has consumed",
        "example:\n  samestep ledger verify runs/bert_mini",
        "Proves that each example of a finished epoch of the data was consumed exactly once, and "
        "each of the last, unfinished epoch at most once, except those that the run excluded. "
        "Exits with 1 if that cannot be proven.",
    )
    step = add_command(
        subcommands,
        "step",
        _step,
        "list the documents in the examples of a step",
        "example:\n  samestep ledger step runs/bert_mini 600 --json",
        "Prints each example of a step with the source file and line of each of its documents.",
    )
    for command in (verify, step):
        command.add_argument(
            "run_folder", metavar="RUN", help="the output folder of a run, finished or not"
        )
    step.add_argument("step", metavar="STEP", type=int, help="the number of a step, from 1")
    step.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (verify, step):
        command.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)


def _verify(args: argparse.Namespace) -> int:
    from samestep.terminal import Console
    from trainer.inspect.audit.batches import Run
    from trainer.inspect.audit.verify import report, verify

    verdict = verify(Run.open(args.run_folder, args.overrides))
    report(verdict, Console(highlight=False, markup=False, soft_wrap=True))
    return EXIT_FAILED if verdict.problems else EXIT_DONE


def _step(args: argparse.Namespace) -> int:
    from samestep.terminal import Console
    from trainer.inspect.audit.batches import Run
    from trainer.inspect.audit.documents import documents, report

    found = documents(Run.open(args.run_folder, args.overrides), args.step)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        report(found, Console(highlight=False, markup=False, soft_wrap=True))
    return EXIT_DONE
