"""The commands `samestep config`, `fetch`, `report`, `watch` and `recipes`."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from samestep.command import OVERRIDES, Commands, add_command
from samestep.errors import EXIT_DONE, EXIT_FAILED


def register_config(commands: Commands) -> None:
    """Adds `config` to the `samestep` command."""
    config = add_command(
        commands,
        "config",
        _config,
        "print an experiment with every setting resolved",
        "With --devices it also checks what would keep the run from starting there: a batch\n"
        "that is too small, an incompatible strategy or model, a dataset or weights that cannot\n"
        "be read, a folder that cannot be written.\n\n"
        "examples:\n  samestep config configs/debug/bert_mini.yaml optimizer.lr=1e-3\n"
        "  samestep config configs/pretrain/bert_large_lamb.yaml --devices 256",
    )
    config.add_argument("file", metavar="EXPERIMENT", help="the experiment, a YAML file")
    config.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    config.add_argument(
        "--devices",
        metavar="N[,N]|here",
        help="check the run for this number of devices (or each of several numbers), or for the "
        "devices of this machine",
    )
    config.add_argument(
        "--elsewhere",
        action="store_true",
        help="the run's folders are not on this machine: check data only if it has an address",
    )


def register_fetch(commands: Commands) -> None:
    """Adds `fetch` to the `samestep` command."""
    fetch = add_command(
        commands,
        "fetch",
        _fetch,
        "download models, tokenizers and data for machines without internet",
        "examples:\n  samestep fetch hf://bert-base-uncased --to models/bert-base-uncased\n"
        "  samestep fetch configs/data/wikipedia_en.yaml limit=1GB --to raw",
    )
    fetch.add_argument(
        "target",
        metavar="TARGET",
        help="hf://NAME, or the file of an experiment or dataset: everything remote that it names",
    )
    fetch.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    fetch.add_argument(
        "--to", metavar="DIR", help="target folder (default: the Hub's cache; for data: fetched/)"
    )


def register_report(commands: Commands) -> None:
    """Adds `report` to the `samestep` command."""
    report = add_command(
        commands,
        "report",
        _report,
        "write an HTML page with the curves and settings of one or several runs",
        "example:\n  samestep report runs/bert_mini runs/bert_mini_lr2 -o report.html",
        looks=True,
    )
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the output folder of a run, a finetune-suite or a study, finished or not",
    )
    help_ = "the file to write (default: report.html, in RUN if one)"
    report.add_argument("-o", "--output", metavar="HTML", help=help_)


def register_watch(commands: Commands) -> None:
    """Adds `watch` to the `samestep` command."""
    watch = add_command(
        commands,
        "watch",
        _watch,
        "show one or several runs live in the browser, while they train",
        "Ctrl-C ends it and writes the page as one HTML file. To watch a run on another machine,\n"
        "start samestep watch there and forward the port: ssh -L 8700:localhost:8700 HOST\n\n"
        "example:\n  samestep watch runs/bert_mini runs/bert_mini_lr2",
        looks=True,
    )
    watch.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the output folder of a run, of a finetune-suite or of a study; it need not exist yet",
    )
    help_ = "port on this machine (default: 8700, or any if that is taken)"
    watch.add_argument("--port", type=int, metavar="N", help=help_)
    watch.add_argument("--once", action="store_true", help="only write the file, and end")
    help_ = "the file to write at the end (default: report.html, in RUN if one)"
    watch.add_argument("-o", "--output", metavar="HTML", help=help_)


def register_recipes(commands: Commands) -> None:
    """Adds `recipes` to the `samestep` command."""
    recipes = add_command(
        commands,
        "recipes",
        _recipes,
        "list, print and copy the recipes that come with samestep",
        "A recipe's name stands for its file wherever a command takes one.\n\n"
        "examples:\n  samestep recipes\n  samestep recipes show recipes/pretrain/bert_base\n"
        "  samestep recipes copy recipes/pretrain/bert_base .\n"
        "  samestep train recipes/pretrain/bert_base",
    )
    subcommands = recipes.add_subparsers(title="commands", metavar="COMMAND")
    show = add_command(
        subcommands,
        "show",
        _show_recipe,
        "print a recipe",
        "`samestep config NAME` prints an experiment with every setting resolved.\n\n"
        "example:\n  samestep recipes show recipes/pretrain/bert_base",
    )
    copy = add_command(
        subcommands,
        "copy",
        _copy_recipe,
        "copy a recipe, to change it",
        "The copy names the recipes that it is based on, so it can lie in any folder.\n\n"
        "example:\n  samestep recipes copy recipes/pretrain/bert_large .",
    )
    for each in (show, copy):
        each.add_argument("name", metavar="NAME", help="as recipes/pretrain/bert_base")
    copy.add_argument("folder", metavar="DIR", type=Path, help="the folder of the copy")


def _fetch(args: argparse.Namespace) -> int:
    from trainer.inspect.fetch import fetch

    settings = fetch(args.target, args.overrides, args.to)
    sys.stdout.write("fetched; it is used with these settings:\n")
    sys.stdout.writelines(f"  {shlex.quote(setting)}\n" for setting in settings)
    return EXIT_DONE


def _report(args: argparse.Namespace) -> int:
    from trainer.inspect.plan.plan import memory_of_run
    from trainer.monitoring.report import default_output, write_report
    from trainer.training.experiment import Experiment

    output = Path(args.output) if args.output else default_output(args.runs)
    write_report(args.runs, output, memory_of_run, Experiment)
    sys.stdout.write(f"{output}\n")
    return EXIT_DONE


def _watch(args: argparse.Namespace) -> int:
    from trainer.inspect.watch import watch
    from trainer.monitoring.report import default_output

    output = Path(args.output) if args.output else default_output(args.runs)
    written = watch(args.runs, output, args.port, args.once)
    return EXIT_FAILED if args.once and not written else EXIT_DONE


def _recipes(_args: argparse.Namespace) -> int:
    from trainer.inspect import recipes

    # A pipe gets whole sentences, and a terminal what fits on a line.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for folder, found in recipes.listing():
        sys.stdout.write(f"{folder}\n")
        for name, summary in found:
            line = f"  {name:52} {summary}"
            if 0 < columns < len(line):
                line = f"{line[: columns - 1]}…"
            sys.stdout.write(f"{line}\n")
    return EXIT_DONE


def _show_recipe(args: argparse.Namespace) -> int:
    from trainer.inspect import recipes

    sys.stdout.write(recipes.file_of(args.name).read_text(encoding="utf-8"))
    return EXIT_DONE


def _copy_recipe(args: argparse.Namespace) -> int:
    from trainer.inspect import recipes

    sys.stdout.write(f"{recipes.copy(args.name, args.folder)}\n")
    return EXIT_DONE


def _config(args: argparse.Namespace) -> int:
    from samestep.config import dump
    from trainer.training.starting import load_experiment

    experiment = load_experiment(args.file, args.overrides, args.elsewhere, offline=True)
    if args.devices is not None:
        from trainer.accelerators import detect
        from trainer.inspect import preflight

        counts = detect.device_counts(args.devices, experiment.accelerator)
        preflight.check(experiment, counts, elsewhere=args.elsewhere)
    sys.stdout.write(dump(experiment))
    return EXIT_DONE
