"""The commands `samestep checkpoint ls|verify|gc|distance|convert`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.command import Commands, add_command, add_group
from samestep.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, ConfigError

if TYPE_CHECKING:
    from samestep.config import Tree
    from samestep.terminal import Console
    from trainer.checkpoint.files import Location
    from trainer.checkpoint.integrity import Check


def register(commands: Commands) -> None:
    """Adds `checkpoint` and its sub-commands to the `samestep` command."""
    subcommands = add_group(
        commands, "checkpoint", "list, verify, clean up, compare and convert checkpoints"
    )
    _add(
        subcommands,
        "ls",
        _ls,
        "list checkpoints: when they were saved, how large they are, and by how many ranks",
        "Checks that all files exist with their full sizes, and reads only the smallest.\n\n"
        "example:\n  samestep checkpoint ls runs/bert_mini",
    )
    _add(
        subcommands,
        "verify",
        _verify,
        "read all files of the checkpoints and compare their checksums",
        "Exits with 1 if any is damaged.\n\nexample:\n  samestep checkpoint verify s3://BUCKET/RUN",
    )
    gc = _add(
        subcommands,
        "gc",
        _gc,
        "remove interrupted saves, and the checkpoints that retention does not keep",
        "Keeps the newest valid checkpoints, the best one and those of checkpoint.keep_every. "
        "Refused\n"
        "while a run writes there.\n\n"
        "example:\n  samestep checkpoint gc runs/bert_mini --keep-last 2 --dry-run",
    )
    gc.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    gc.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="valid ones to keep, 2 or more (default: the run's own)",
    )
    distance = _add(
        subcommands,
        "distance",
        _distance,
        "show how far the weights of a checkpoint have moved from another one's",
        "The L2 norm of the difference, divided by the norm of the first weights, for each layer.\n"
        "Parameters that only one of them has, such as a task's head, are left out.\n\n"
        "example:\n  samestep checkpoint distance runs/bert_mini runs/mrpc",
        source="the weights before: a run or a step, a Hugging Face folder or hf://NAME",
    )
    distance.add_argument("other", metavar="CKPT", help="the weights after, likewise")
    distance.add_argument(
        "--scores", type=Path, metavar="FILE", help="also write the distances to this file, as JSON"
    )
    convert = _add(
        subcommands,
        "convert",
        _convert,
        "import a DeepSpeed run or ELMo's weights, or export a run to DeepSpeed",
        "Converts weights, moments and the number of updates (see docs/deepspeed.md); of ELMo's\n"
        "file, weights (see docs/models.md).\n\n"
        "examples:\n  samestep checkpoint convert deepspeed_run pretrain.yaml output=runs/bert\n"
        "  samestep checkpoint convert runs/bert for_deepspeed",
        source="a checkpoint of DeepSpeed (ZeRO stage 1 to 3, or universal), or ELMo's weights, an "
        "HDF5 file; or a run or checkpoint of samestep",
    )
    help_ = "the experiment that resumes the imported run, a YAML file; or the folder to export to"
    convert.add_argument("target", metavar="EXPERIMENT|DIR", help=help_)
    help_ = "settings that override the experiment's, e.g. output=runs/bert"
    convert.add_argument("overrides", nargs="*", metavar="key=value", help=help_)


def _add(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    source: str | None = None,
) -> argparse.ArgumentParser:
    # Those with a source of their own load the model, which the others do not need.
    parser = add_command(commands, name, run, summary, epilog, looks=source is None)
    source = source or "a run, or the folder or address of its checkpoints"
    parser.add_argument("folder", metavar="DIR", help=source)
    return parser


def _ls(args: argparse.Namespace) -> int:
    from trainer.checkpoint import integrity

    _report(_root(args), integrity.check_sizes, "committed")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from trainer.checkpoint import integrity

    return EXIT_FAILED if _report(_root(args), integrity.check_content, "whole") else EXIT_DONE


def _report(root: Location, check: Check, valid: str) -> int:
    """Prints a table of all steps, then the damage. Returns the number of damaged steps."""
    from rich.filesize import decimal
    from rich.table import Table

    from trainer.checkpoint import history, integrity

    table = Table("step", "age", "size", "ranks", "state")
    saved = integrity.listed(root)
    problems = [*integrity.damaged_leases(root, saved), *integrity.damaged_numbers(saved)]
    # The newest readable meta.json knows which step is the best.
    steps = integrity.steps_that_count(saved)
    found = [(step, *_examine(root, step, check)) for step in steps]
    best = next((meta.get("best", {}).get("step") for _, meta, _ in reversed(found) if meta), None)
    for step, meta, damage in found:
        folder = integrity.step_folder(root, step)
        if damage is not None:
            if not integrity.is_committed(folder):  # a running training has removed it meanwhile
                continue
            problems.append(f"step {step}: {damage}")
        age = _age(meta["saved"]) if "saved" in meta else "-"
        state = ("damaged" if damage else valid) + (", best" if step == best else "")
        ranks = str(meta.get("world_size", "-"))
        table.add_row(str(step), age, decimal(_size(folder)), ranks, state)
    others = {
        "not committed": integrity.uncommitted_folders(root),
        "superseded": integrity.superseded_folders(root),
    }
    for state, folders in others.items():
        for folder in folders:
            # Without COMMITTED, the name of the folder alone has the step.
            number = str(history.folders([folder.name])[0].step)
            table.add_row(number, "-", decimal(_size(folder)), "-", state)
    if not table.row_count:
        raise CheckpointError(f"there is no checkpoint in {root}. Check the folder")
    console = _console()
    console.print(table)
    for problem in problems:
        console.print(problem)
    return len(problems)


def _examine(root: Location, step: int, check: Check) -> tuple[Tree, str | None]:
    """Returns the content of meta.json, {} if it cannot be read, and the damage, if any."""
    from trainer.checkpoint import integrity, read_meta

    meta: Tree = {}

    def read(folder: Location) -> None:
        check(folder)
        meta.update(read_meta(folder))

    return meta, integrity.find_damage(integrity.step_folder(root, step), read)


def _gc(args: argparse.Namespace) -> int:
    from rich.filesize import decimal

    from samestep.config import decode
    from trainer.checkpoint import Config, holding, integrity, removal
    from trainer.checkpoint.lock import only_writer
    from trainer.checkpoint.meta import best_step, newest_meta

    root = _root(args)
    # As in the run that saved the newest checkpoint, unless the command line says otherwise.
    stored = newest_meta(root).get("config", {}).get("checkpoint", {})
    settings = {key: stored[key] for key in ("keep_last", "keep_every") if key in stored}
    if args.keep_last is not None:
        settings["keep_last"] = args.keep_last
    config = decode(Config, settings, "checkpoint")  # rejects keep_last below 2
    verb = "would remove" if args.dry_run else "removed"
    console = _console()
    # A dry run may look on while a training run writes; a removal must not.
    with nullcontext() if args.dry_run else only_writer(root):
        best, check = best_step(root), integrity.check_content
        last, every = config.keep_last, config.keep_every
        outdated = removal.outdated_steps(root, last, every, check, best)
        going = integrity.uncommitted_folders(root) + integrity.superseded_folders(root)
        going += [integrity.step_folder(root, step) for step in outdated]
        removed, freed, held = 0, 0, holding.Holds(root).held(certain=not args.dry_run)
        for folder in going:
            size = _size(folder)
            with holding.unless_held(folder, held) as free:
                # Within the lock, so that no reader begins; the files go after it.
                if free and not args.dry_run:
                    integrity.uncommit(folder)
            if not free:
                console.print(f"{folder} is being read, and stays")
                continue
            if not args.dry_run:
                integrity.remove_step(folder)
            console.print(f"{verb} {folder}, {decimal(size)}")
            removed, freed = removed + 1, freed + size
    console.print(f"{verb} {removed} folders, {decimal(freed)}")
    return EXIT_DONE


def _distance(args: argparse.Namespace) -> int:
    import json

    from rich.table import Table

    from samestep.storage import write_text
    from trainer.inspect import distance
    from trainer.training.weights.loading import load_weights

    before, after = load_weights(args.folder), load_weights(args.other)
    found = distance.by_group(before, after)
    table = Table("group", "parameters", "relative distance")
    for name, group in found.items():
        table.add_row(name, f"{group.parameters:,}", f"{group.relative:.4g}")
    console = _console()
    console.print(table)
    if left_out := distance.left_out(before, after):
        console.print(
            "left out, because only one of them has it, or has it in another shape or in a head of "
            f"another kind: {', '.join(left_out)}"
        )
    if args.scores is not None:
        scores = {name: group.relative for name, group in found.items()}
        write_text(args.scores, json.dumps(scores) + "\n")
    return EXIT_DONE


def _convert(args: argparse.Namespace) -> int:
    from samestep.config import recipes
    from trainer.checkpoint import elmo
    from trainer.inspect import conversion
    from trainer.training.starting import load_experiment

    # An experiment as the target resumes a foreign checkpoint; a folder gets an export.
    if recipes.locate(args.target).suffix in (".yaml", ".yml"):
        experiment = load_experiment(args.target, args.overrides)
        source = Path(args.folder)
        if not source.exists():
            raise CheckpointError(f"there is no {args.folder} on this machine")
        if elmo.is_weights(source):
            conversion.import_elmo(source, experiment)
        else:
            conversion.import_deepspeed(source, experiment)
    elif args.overrides:
        raise ConfigError(
            f"{args.target} is not an experiment (a YAML file), so {args.overrides[0]} changes "
            "nothing. Leave it out"
        )
    else:
        conversion.export_deepspeed(args.folder, args.target)
    return EXIT_DONE


def _root(args: argparse.Namespace) -> Location:
    """Returns the folder of all checkpoints of the run that the user named."""
    from trainer.checkpoint import files, integrity
    from trainer.training.weights.places import checkpoints_of

    root = files.location(args.folder.rstrip("/"))
    if (root / integrity.META).exists():
        raise CheckpointError(
            f"{root} is one checkpoint; name the run, or the folder of all: {root.parent}"
        )
    return checkpoints_of(root)


def _size(folder: Location) -> int:
    """Returns the bytes of a folder's files, except those that a running training removes."""
    from trainer.checkpoint import files

    total = 0
    for name in files.names(folder):
        # A file may be gone since it was listed.
        with suppress(CheckpointError):
            total += files.size(folder / name)
    return total


def _age(saved: str) -> str:
    age = datetime.now(UTC) - datetime.fromisoformat(saved)
    return str(timedelta(seconds=max(0, round(age.total_seconds()))))  # clocks may differ


def _console() -> Console:
    from samestep.terminal import Console

    return Console(soft_wrap=True, highlight=False, markup=False)
