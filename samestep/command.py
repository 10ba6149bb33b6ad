"""Builds sub-commands of `samestep`, which look alike in every package."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OVERRIDES = "settings that override the file's, e.g. optimizer.lr=1e-3 training.steps=100"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    description: str | None = None,
    looks: bool = False,
) -> argparse.ArgumentParser:
    """Adds a sub-command; returns its parser, for its arguments.

    Args:
        run: what the command does; returns the exit code.
        summary: a line for the list of commands, without a capital and a full stop.
        epilog: end of the command's own help: details, an example.
        description: beginning of the command's own help; None takes the summary.
        looks: the command only looks at a folder, which may be a stranger's: no module that a kind
            in it names is imported.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=description or summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, reject=parser.error, looks=parser.prog if looks else None)
    return parser


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """Adds a sub-command that has sub-commands of its own; returns these, none yet."""
    sentence = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=sentence)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_processes(parser: argparse.ArgumentParser, without_gpus: str = "one") -> None:
    """Adds --processes.

    Args:
        without_gpus: the default number on a machine without GPUs, as a word.
    """
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"processes on this machine (default: one per GPU; {without_gpus} without GPUs); "
        "ignored under torchrun",
    )


def in_typed_order(args: argparse.Namespace, overrides: Iterable[str]) -> list[str]:
    """Sorts overrides as on the command line, where options that take lists may separate them.

    Args:
        args: `typed` has the command line.
    """
    left = Counter(overrides)
    ordered = []
    for argument in args.typed:
        if left[argument]:
            left[argument] -= 1
            ordered.append(argument)
    # What is left was the value of an option, as in --throughput=optimizer.lr=1e-3.
    return [*ordered, *left.elements()]
