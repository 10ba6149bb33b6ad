"""`samestep data ...`: commands that make datasets and look into them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from trainer.command import Commands, add_command, add_group
from trainer.errors import EXIT_DONE, EXIT_FAILED, ConfigError

_OVERRIDES = "settings that replace those of the file, e.g. output=datasets/mine on_error=skip"


def register(commands: Commands) -> None:
    """Adds `data` and its sub-commands to the `samestep` command."""
    summary = "make a dataset from raw text, and look into it"
    subcommands = add_group(commands, "data", summary)
    add_tokenizer(subcommands)
    add_build(subcommands)
    add_verify(subcommands)
    add_inspect(subcommands)
    add_show(subcommands)
    add_push(subcommands)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that reads a dataset's configuration."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file: the dataset, or a task as in configs/tasks/"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)


def add_tokenizer(commands: Commands) -> None:
    """`samestep data tokenizer`."""
    parser = add_command(
        commands,
        "tokenizer",
        _tokenizer,
        "train the tokenizer of a dataset on its source",
        "It is written to tokenizer.path, where `samestep data build` and `transformers` find it. "
        "Training twice\n"
        "gives two tokenizers, so a dataset never trains its own.\n\n"
        "example:\n  samestep data tokenizer configs/data/python_docs.yaml "
        "tokenizer.vocab_size=16384",
    )
    add_config(parser)
    parser.add_argument("--force", action="store_true", help="replace the tokenizer that is there")


def add_build(commands: Commands) -> None:
    """`samestep data build`."""
    parser = add_command(
        commands,
        "build",
        _build,
        "tokenise raw text into a dataset of shards",
        "Stopped at any moment, even by kill -9, it goes on where it was when it is run again. The "
        "result depends\n"
        "on the text and the settings only, not on the number of workers.\n\n"
        "With --slice I/N, for I from 1 to N, commands on any machines that share the folder share "
        "the work, in any\n"
        "order, at once or not. The last one to be done merges and verifies; the result is that of "
        "one build.\n\n"
        "examples:\n  samestep data build configs/data/python_docs.yaml output=datasets/docs "
        "workers=4\n"
        "  samestep data build configs/data/python_docs.yaml output=/shared/docs --slice 3/8\n"
        "  samestep data build configs/tasks/glue/cola.yaml tokenizer.path=runs/bert/tokenizer "
        "output=datasets/cola",
    )
    add_config(parser)
    parser.add_argument(
        "--slice", metavar="I/N", help="make one of N equal shares only, I from 1 to N"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the finished dataset that is there"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="look whether it could begin: source, tokenizer, settings",
    )


def add_verify(commands: Commands) -> None:
    """`samestep data verify`."""
    parser = add_command(
        commands,
        "verify",
        _verify,
        "check every byte of a dataset against its manifest",
        "Prints what is wrong, a line each, and exits with 1 if anything is.\n\n"
        "example:\n  samestep data verify datasets/python_docs",
    )
    parser.add_argument("folder", metavar="DIR", help="the dataset's folder or address")


def add_inspect(commands: Commands) -> None:
    """`samestep data inspect`."""
    parser = add_command(
        commands,
        "inspect",
        _inspect,
        "show what is in a dataset and how it would pack",
        "Prints documents, tokens and lengths, and for each packing how many examples an epoch has "
        "and how much of\n"
        "them is text. Packings are compared with one special token before and one after each "
        "piece.\n\n"
        "example:\n  samestep data inspect datasets/python_docs --plot lengths.png",
    )
    parser.add_argument("folder", metavar="DIR", help="the dataset's folder or address")
    parser.add_argument("--plot", metavar="FILE", help="also draw the tables into this image")


def add_show(commands: Commands) -> None:
    """`samestep data show`."""
    parser = add_command(
        commands,
        "show",
        _show,
        "print examples as the model sees them",
        "The objective, packing, order and seed are those of an experiment; what is predicted is "
        "marked, and each\n"
        "piece of text is preceded by the file and line it comes from.\n\n"
        "example:\n  samestep data show datasets/python_docs data.packing=best_fit "
        "--objective configs/debug/bert_mini.yaml --index 1000",
    )
    parser.add_argument("folder", metavar="DIR", help="the dataset's folder or address")
    parser.add_argument(
        "--objective",
        metavar="CONFIG",
        required=True,
        help="an experiment, as for `samestep train`",
    )
    parser.add_argument(
        "--index",
        type=int,
        default=0,
        metavar="N",
        help="the first example, in the order of training",
    )
    parser.add_argument("--count", type=int, default=3, metavar="K", help="how many")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the experiment's"
    )


def add_push(commands: Commands) -> None:
    """`samestep data push`."""
    parser = add_command(
        commands,
        "push",
        _push,
        "copy a dataset to an object store, from where runs can stream it",
        "Stopped at any moment, it goes on with what is missing when it is run again. The manifest "
        "comes last, so\n"
        "nobody can train on a part. Endpoint and credentials are those of the store's own "
        "tools.\n\n"
        "example:\n  samestep data push datasets/python_docs s3://bucket/python_docs",
    )
    parser.add_argument("folder", metavar="DIR", help="the dataset's folder")
    parser.add_argument("url", metavar="URL", help="s3://BUCKET/NAME or gs://BUCKET/NAME")
    parser.add_argument(
        "--force", action="store_true", help="replace the other dataset that is there"
    )


# Every `samestep --help` imports this module: what a command needs is imported by the command.


def _tokenizer(args: argparse.Namespace) -> int:
    from data_pipeline.building.recipe import load_recipe
    from data_pipeline.building.tokenizer_training import train_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train_tokenizer(load_recipe(args.config, args.overrides), force=args.force)
    return EXIT_DONE


def _build(args: argparse.Namespace) -> int:
    from data_pipeline.building import build
    from data_pipeline.building.recipe import load_recipe
    from data_pipeline.building.slices import Slice

    part = None if args.slice is None else Slice.parse(args.slice)
    if part is not None and args.force:
        raise ConfigError(
            f"--force does not go with --slice {part}: each slice would remove what the others "
            "have made; replace the "
            f"finished dataset with one samestep data build --force, or choose another output=DIR"
        )
    config = load_recipe(args.config, args.overrides)
    if args.check:
        build.check(config)
    else:
        build.build(config, args.force, part)
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from rich.console import Console

    from data_pipeline.building.verify import verify
    from data_pipeline.reading.remote import load_manifest

    location = args.folder.rstrip("/")
    problems = verify(location)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for problem in problems:
        console.print(problem)
    if problems:
        console.print(
            f"{location} is damaged ({len(problems)} problems): copy it again, or build it again "
            "(--force)"
        )
        return EXIT_FAILED
    manifest = load_manifest(location)
    console.print(f"{location} is whole: {len(manifest.shards)} shards, digest {manifest.digest}")
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from data_pipeline.inspection.report import inspect, plot, report
    from data_pipeline.reading.dataset import Dataset

    inspection = inspect(Dataset.open(args.folder))
    report(inspection, Console())
    if args.plot:
        plot(inspection, Path(args.plot))
    return EXIT_DONE


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from data_pipeline.inspection.show import show

    show(args.folder, args.objective, args.overrides, args.index, args.count, Console())
    return EXIT_DONE


def _push(args: argparse.Namespace) -> int:
    from data_pipeline.building.push import push

    push(Path(args.folder), args.url, force=args.force)
    return EXIT_DONE
