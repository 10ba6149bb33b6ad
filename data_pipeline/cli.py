"""`samestep data ...`: commands that build datasets and inspect them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from samestep.command import Commands, add_command, add_group
from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError

# Every `samestep --help` imports this module, and must be fast: torch, tokenizers and rich take
# seconds. So a command imports what it needs when it runs.


def register(commands: Commands) -> None:
    """Adds `data` and its sub-commands to the `samestep` command."""
    subcommands = add_group(commands, "data", "build a dataset from raw text, and inspect it")
    _add_tokenizer(subcommands)
    _add_extend(subcommands)
    _add_build(subcommands)
    _add_verify(subcommands)
    _add_inspect(subcommands)
    _add_show(subcommands)
    _add_push(subcommands)
    _add_export(subcommands)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="YAML file: a dataset, or a task as in configs/tasks/"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings to replace in the file, e.g. output=datasets/mine on_error=skip",
    )


def _add_folder(parser: argparse.ArgumentParser, text: str = "folder or address") -> None:
    parser.add_argument("folder", metavar="DIR", help=f"the dataset's {text}")


def _add_tokenizer(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tokenizer",
        _tokenizer,
        "train the tokenizer of a dataset on its source",
        "The tokenizer is written to tokenizer.path, where `samestep data build` and\n"
        "`transformers` find it. A build never trains one: several datasets may share it.\n\n"
        "example:\n"
        "  samestep data tokenizer configs/data/python_docs.yaml tokenizer.vocab_size=16384",
    )
    _add_config(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing tokenizer")


def _add_extend(commands: Commands) -> None:
    parser = add_command(
        commands,
        "extend",
        _extend,
        "add tokens to a tokenizer, to train its model further with them",
        "The tokenizer's own tokens keep their ids; the new ones come after them. Build a dataset\n"
        "with the result, and train with init_from and a larger model.vocab_size: the rows of\n"
        "the new tokens start as the mean of the others.\n\n"
        "example:\n"
        "  samestep data extend hf://bert-base-uncased words.txt datasets/tokenizers/medical",
    )
    parser.add_argument(
        "tokenizer", metavar="TOKENIZER", help="its folder, or hf://NAME on the Hugging Face Hub"
    )
    parser.add_argument("tokens", metavar="FILE", help="text file with one token per line")
    parser.add_argument("folder", metavar="DIR", help="folder for the larger tokenizer")
    parser.add_argument(
        "--whole-words",
        action="store_true",
        help="find the new tokens only where no letter or digit is next to them; by default also "
        "inside of words, as with add_tokens of transformers",
    )
    parser.add_argument("--force", action="store_true", help="replace what is in DIR")


def _add_build(commands: Commands) -> None:
    parser = add_command(
        commands,
        "build",
        _build,
        "tokenize raw text into a dataset of shards",
        "A build that was stopped at any moment, even by kill -9, resumes when it is run again.\n"
        "The result depends on the text and the settings only, not on the number of workers.\n\n"
        "With --slice I/N, for I from 1 to N, commands on any machines that share the folder\n"
        "share the work, in any order, at the same time or not. The last one to finish merges\n"
        "and verifies. The result is the same as from one build.\n\n"
        "examples:\n"
        "  samestep data build configs/data/python_docs.yaml output=datasets/docs workers=4\n"
        "  samestep data build configs/data/python_docs.yaml output=/shared/docs --slice 3/8\n"
        "  samestep data build configs/tasks/glue/cola.yaml tokenizer.path=runs/bert/tokenizer "
        "output=datasets/cola",
    )
    _add_config(parser)
    # Counted from 1, as the indices of job arrays usually are.
    parser.add_argument(
        "--slice", metavar="I/N", help="build only one of N equal shares, I from 1 to N"
    )
    parser.add_argument("--force", action="store_true", help="replace a finished dataset")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check that the build could begin: source, tokenizer, settings",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="with --check: source and tokenizer are not on this machine, so check settings only",
    )


def _add_verify(commands: Commands) -> None:
    parser = add_command(
        commands,
        "verify",
        _verify,
        "compare every byte of a dataset with its manifest",
        "Prints a line for each problem, and exits with 1 if there is any. Files of which the\n"
        "manifest has no hash are listed, too.\n\n"
        "example:\n  samestep data verify datasets/python_docs",
        looks=True,
    )
    _add_folder(parser)


def _add_inspect(commands: Commands) -> None:
    parser = add_command(
        commands,
        "inspect",
        _inspect,
        "show the content of a dataset and how it would pack",
        "Prints documents, tokens and lengths, and for each packing the number of examples in an\n"
        "epoch and the fraction of positions with text, with one special token before and one\n"
        "after each chunk of a document.\n\n"
        "example:\n  samestep data inspect datasets/python_docs --plot lengths.png",
        looks=True,
    )
    _add_folder(parser)
    parser.add_argument("--plot", metavar="FILE", help="also plot the tables into this image")


def _add_show(commands: Commands) -> None:
    parser = add_command(
        commands,
        "show",
        _show,
        "print examples as the model sees them",
        "Objective, packing, order and seed come from an experiment. Predicted tokens are marked,\n"
        "and each chunk of text is preceded by its file and line.\n\n"
        "example:\n"
        "  samestep data show datasets/python_docs data.packing=best_fit "
        "--objective configs/debug/bert_mini.yaml --index 1000",
    )
    _add_folder(parser)
    parser.add_argument(
        "--objective",
        metavar="CONFIG",
        required=True,
        help="an experiment, whose objective, packing, order and seed are used",
    )
    parser.add_argument(
        "--index",
        type=int,
        default=0,
        metavar="N",
        help="first example, in training order (default: 0)",
    )
    parser.add_argument(
        "--count", type=int, default=3, metavar="K", help="number of examples to print (default: 3)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the experiment's"
    )


def _add_push(commands: Commands) -> None:
    parser = add_command(
        commands,
        "push",
        _push,
        "copy a dataset to an object store, from where runs can stream it",
        "A push that was stopped at any moment resumes when it is run again. The manifest comes\n"
        "last, so nobody can train on an incomplete copy. Endpoint and credentials are found\n"
        "where the store's own tools find them.\n\n"
        "example:\n  samestep data push datasets/python_docs s3://bucket/python_docs",
        looks=True,
    )
    # A dataset at an address was pushed there before.
    _add_folder(parser, "folder")
    parser.add_argument("url", metavar="URL", help="s3://BUCKET/NAME or gs://BUCKET/NAME")
    parser.add_argument("--force", action="store_true", help="replace another dataset at URL")


def _add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "write a dataset as plain WebDataset, for other trainers",
        "Each document is a sample: KEY.tokens.npy, KEY.json with its source file and line, and\n"
        "KEY.txt, which is decoded from the tokens and is not the original text. An export that\n"
        "was stopped at any moment resumes when it is run again.\n\n"
        "example:\n"
        "  samestep data export datasets/python_docs s3://bucket/python_docs_wds",
        looks=True,
    )
    _add_folder(parser)
    parser.add_argument("target", metavar="URL", help="new folder: local, s3:// or gs://")


def _tokenizer(args: argparse.Namespace) -> int:
    from data_pipeline.building.recipe import load_recipe
    from data_pipeline.building.tokenizer_training import train_tokenizer

    recipe = load_recipe(args.config, args.overrides)
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # off by default, as builds have many processes
    try:
        train_tokenizer(recipe, args.force)
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before  # a process that is forked later would hang
    return EXIT_DONE


def _extend(args: argparse.Namespace) -> int:
    from data_pipeline.building.tokenizer_extension import extend

    extend(args.tokenizer, args.tokens, args.folder, args.whole_words, args.force)
    return EXIT_DONE


def _build(args: argparse.Namespace) -> int:
    from data_pipeline.building import build
    from data_pipeline.building.recipe import load_recipe
    from data_pipeline.building.slices import Slice

    # Parsed first: a wrong --slice needs no tokenizer to be found.
    part = None if args.slice is None else Slice.parse(args.slice)
    # Refused before the recipe is read: each slice would remove what the others have built.
    if part is not None and args.force:
        raise ConfigError(
            f"--force does not go with --slice {part}. Replace the finished dataset with one "
            "samestep data build --force, or choose another output=DIR."
        )
    if args.elsewhere and not args.check:
        raise ConfigError("--elsewhere only changes what --check looks at. Add --check.")
    config = load_recipe(args.config, args.overrides)
    if args.check:
        if not args.elsewhere:
            build.check(config)
    else:
        build.build(config, args.force, part)
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from data_pipeline.building.verify import unsealed, verify
    from data_pipeline.reading.dataset import load_manifest
    from samestep.terminal import Console

    # Shell completion ends folders with a slash, and an address with two has no such object.
    location = args.folder.rstrip("/")
    problems = verify(location)
    # Names of files may hold brackets, which would be markup to rich.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for sentence in (*problems, *unsealed(location)):
        console.print(sentence)
    if problems:
        console.print(
            f"{location} is damaged ({len(problems)} problems). Copy it again, or build it again "
            "with --force."
        )
        return EXIT_FAILED
    # The digest is the name of the dataset in checkpoints.
    manifest = load_manifest(location)
    console.print(f"{location} is whole: {len(manifest.shards)} shards, digest {manifest.digest}")
    return EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    from data_pipeline.inspection.report import inspect, plot, report
    from data_pipeline.reading.dataset import Dataset
    from samestep.terminal import Console

    # Opening checks the sizes of all shards, so a damaged dataset is named at once.
    inspection = inspect(Dataset.open(args.folder))
    report(inspection, Console())
    if args.plot:
        plot(inspection, Path(args.plot))
    return EXIT_DONE


def _show(args: argparse.Namespace) -> int:
    from data_pipeline.inspection.show import show
    from samestep.terminal import Console

    show(args.folder, args.objective, args.overrides, args.index, args.count, Console())
    return EXIT_DONE


def _push(args: argparse.Namespace) -> int:
    from data_pipeline.building.push import push

    push(Path(args.folder), args.url, args.force)
    return EXIT_DONE


def _export(args: argparse.Namespace) -> int:
    from data_pipeline.building.export import export

    export(args.folder.rstrip("/"), args.target)
    return EXIT_DONE
