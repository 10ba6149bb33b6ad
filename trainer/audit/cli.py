"""`samestep ledger ...`: commands that read what a run was fed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TypeAlias

from rich.console import Console

from trainer.errors import EXIT_DONE, EXIT_FAILED

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_OVERRIDES = "settings that replace those of the run, e.g. data.path=DIR where the dataset has moved"


def register(commands: Commands) -> None:
    """Adds `ledger` and its sub-commands to the `samestep` command."""
    summary = "prove what a run was fed, over all its restarts"
    parser = commands.add_parser("ledger", help=summary, description=summary)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    verify = subcommands.add_parser(
        "verify",
        help="make all batches of a run again and compare them with what its processes were fed",
        description="Proves that each example of a finished pass over the data was consumed exactly once, and each of "
        "the last one at most once, but for those that the run excluded. Exits with 1 if that is not so.",
        epilog="example:\n  samestep ledger verify runs/bert_mini",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.set_defaults(run=_verify)
    step = subcommands.add_parser(
        "step",
        help="list the documents that a step saw",
        description="Prints each example of a step with the source file and line of each document that it has text of.",
        epilog="example:\n  samestep ledger step runs/bert_mini 600 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    step.set_defaults(run=_step)
    for command in (verify, step):
        command.add_argument("run_folder", metavar="RUN", help="the output folder of a run, finished or not")
    step.add_argument("step", metavar="STEP", type=int, help="the number of a step, from 1")
    step.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (verify, step):
        command.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)


def _verify(args: argparse.Namespace) -> int:
    from trainer.audit.batches import Run
    from trainer.audit.verify import report, verify

    verdict = verify(Run.open(args.run_folder, args.overrides))
    report(verdict, Console(highlight=False, soft_wrap=True))
    return EXIT_FAILED if verdict.problems else EXIT_DONE


def _step(args: argparse.Namespace) -> int:
    from trainer.audit.batches import Run
    from trainer.audit.documents import documents, report

    found = documents(Run.open(args.run_folder, args.overrides), args.step)
    if args.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        report(found, Console(highlight=False, markup=False, soft_wrap=True))
    return EXIT_DONE
