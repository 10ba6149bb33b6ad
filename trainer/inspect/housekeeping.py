"""`samestep checkpoint ls|verify|gc|convert`.

Looking after the checkpoints of a run, wherever they lie.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.command import Commands, add_command, add_group
from trainer.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, ConfigError

if TYPE_CHECKING:
    from trainer.checkpoint import Config
    from trainer.checkpoint.files import Location
    from trainer.config import Tree


def register(commands: Commands) -> None:
    """Adds `checkpoint` and its sub-commands to the `samestep` command."""
    subcommands = add_group(
        commands, "checkpoint", "list, verify, clean up and convert the checkpoints of a run"
    )
    _add(
        subcommands,
        "ls",
        _ls,
        "list checkpoints: when they were saved, how large they are, and by how many ranks",
        "Looks whether all files are there in full length, and reads none but the smallest.\n\n"
        "example:\n  samestep checkpoint ls runs/bert_mini",
    )
    _add(
        subcommands,
        "verify",
        _verify,
        "read checkpoints through and compare their checksums",
        "Exits with 1 if any is damaged.\n\nexample:\n  samestep checkpoint verify s3://BUCKET/RUN",
    )
    gc = _add(
        subcommands,
        "gc",
        _gc,
        "remove what saves that were cut short have left, and the checkpoints that retention lets "
        "go",
        "The newest that stay are verified. Refused while a training writes there.\n\n"
        "example:\n  samestep checkpoint gc runs/bert_mini --keep-last 2 --dry-run",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="sound ones to keep, 2 or more (default: the run's own)",
    )
    convert = _add(
        subcommands,
        "convert",
        _convert,
        "take over a run of DeepSpeed, or hand a run over to it",
        "Weights, moments and the number of updates go over; see docs/deepspeed.md.\n\n"
        "examples:\n  samestep checkpoint convert deepspeed_run pretrain.yaml output=runs/bert\n"
        "  samestep checkpoint convert runs/bert for_deepspeed",
        source="a checkpoint of DeepSpeed (ZeRO stage 1 to 3, or universal); or a run or checkpoint of samestep",
    )
    help_ = "the experiment that is to go on from DeepSpeed's, a YAML file; or a folder for DeepSpeed's checkpoint"
    convert.add_argument("target", metavar="EXPERIMENT|DIR", help=help_)
    help_ = "settings that replace those of the experiment, e.g. output=runs/bert"
    convert.add_argument("overrides", nargs="*", metavar="key=value", help=help_)


def _add(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    source: str = "a run, or the folder or address of its checkpoints",
) -> argparse.ArgumentParser:
    parser = add_command(commands, name, run, summary, epilog)
    parser.add_argument("folder", metavar="DIR", help=source)
    return parser


def _ls(args: argparse.Namespace) -> int:
    from trainer.checkpoint import integrity

    _report(_root(args), integrity.check_sizes, "committed")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from trainer.checkpoint import integrity

    return EXIT_FAILED if _report(_root(args), integrity.check_content, "whole") else EXIT_DONE


def _report(root: Location, check: Callable[[Location], None], sound: str) -> int:
    """Prints a table of all steps, then what is wrong with which; returns how many are damaged."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from trainer.checkpoint import integrity

    table = Table("step", "age", "size", "ranks", "state")
    problems = []
    found = [
        (step, *_look_at(integrity.step_folder(root, step), check))
        for step in integrity.committed_steps(root)
    ]
    best = next((meta.get("best", {}).get("step") for _, meta, _ in reversed(found) if meta), None)
    for step, meta, damage in found:
        folder = integrity.step_folder(root, step)
        if damage is not None:
            if not integrity.is_committed(
                folder
            ):  # the retention of a training that goes on has removed it
                continue
            problems.append(f"step {step}: {damage}")
        age = _age(meta["saved"]) if "saved" in meta else "-"
        state = ("damaged" if damage else sound) + (", best" if step == best else "")
        table.add_row(
            str(step), age, decimal(_size(folder)), str(meta.get("world_size", "-")), state
        )
    for folder in integrity.uncommitted_folders(root):
        table.add_row(
            str(int(folder.name.rpartition("-")[2])),
            "-",
            decimal(_size(folder)),
            "-",
            "not committed",
        )
    if not table.row_count:
        raise CheckpointError(f"there is no checkpoint in {root}; check the folder")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for problem in problems:
        console.print(problem)
    return len(problems)


def _look_at(folder: Location, check: Callable[[Location], None]) -> tuple[Tree, str | None]:
    """What a step says about itself, and what is wrong with it, if anything."""
    from trainer.checkpoint import integrity

    meta: Tree = {}

    def read(folder: Location) -> None:
        check(folder)
        meta.update(integrity.read_meta(folder))

    return meta, integrity.find_damage(folder, read)


def _gc(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.filesize import decimal

    from trainer.checkpoint import integrity, retention
    from trainer.checkpoint.lock import only_writer

    root = _root(args)
    config = _retention(root, args.keep_last)
    said = "would remove" if args.dry_run else "removed"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with nullcontext() if args.dry_run else only_writer(root):
        outdated = retention.outdated_steps(
            root,
            config.keep_last,
            config.keep_every,
            integrity.check_content,
            retention.best_step(root),
        )
        going = [
            *integrity.uncommitted_folders(root),
            *(integrity.step_folder(root, step) for step in outdated),
        ]
        freed = 0
        for folder in going:
            size = _size(folder)
            if not args.dry_run:
                integrity.remove_step(folder)
            console.print(f"{said} {folder}, {decimal(size)}")
            freed += size
    console.print(f"{said} {len(going)} folders, {decimal(freed)}")
    return EXIT_DONE


def _convert(args: argparse.Namespace) -> int:
    from trainer.inspect import conversion
    from trainer.training.starting import load_experiment

    if Path(args.target).suffix in (".yaml", ".yml"):
        conversion.take_over(Path(args.folder), load_experiment(args.target, args.overrides))
    elif args.overrides:
        raise ConfigError(
            f"{args.target} is no experiment (a YAML file), so {args.overrides[0]} has nothing to "
            "replace; leave it out"
        )
    else:
        conversion.hand_over(args.folder, args.target)
    return EXIT_DONE


def _root(args: argparse.Namespace) -> Location:
    from trainer.checkpoint import files, integrity
    from trainer.training.weights import checkpoints_of

    root = files.location(args.folder.rstrip("/"))
    if (root / integrity.META).exists():
        raise CheckpointError(
            f"{root} is one checkpoint; name the run, or the folder of all: {root.parent}"
        )
    return checkpoints_of(root)


def _retention(root: Location, keep_last: int | None) -> Config:
    """What the run keeps that made the newest readable checkpoint, unless something else is asked
    for.
    """
    from trainer.checkpoint import Config, integrity, read_meta

    kept: Tree = {}
    for step in integrity.committed_steps(root):
        with suppress(CheckpointError):
            section = read_meta(integrity.step_folder(root, step))["config"]["checkpoint"]
            kept = {name: section[name] for name in ("keep_last", "keep_every")}
    return Config(**(kept if keep_last is None else {**kept, "keep_last": keep_last}))


def _size(folder: Location) -> int:
    """Of the files that stay while this looks: a training that goes on renames and removes some."""
    from trainer.checkpoint import files

    total = 0
    for name in files.names(folder):
        with suppress(CheckpointError):
            total += files.size(folder / name)
    return total


def _age(saved: str) -> str:
    return str(
        timedelta(
            seconds=round((datetime.now(UTC) - datetime.fromisoformat(saved)).total_seconds())
        )
    )
