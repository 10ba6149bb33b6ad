"""`samestep vectors`: its arguments.

`samestep --help` imports this module, so the command imports its modules when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, ConfigError
from trainer.vectors.settings import METHODS, UNITS, WIDEST_WINDOW, Settings


def register(commands: Commands) -> None:
    """Adds `samestep vectors`."""
    parser = add_command(
        commands,
        "vectors",
        _vectors,
        "train word vectors on a dataset: word2vec, GloVe or PPMI",
        "The same command gives the same bytes on a machine. If it is stopped, it resumes.\n\n"
        "examples:\n"
        "  samestep vectors datasets/wikipedia --method skipgram --output vectors/skipgram\n"
        "  samestep vectors datasets/wikipedia --method glove --dimensions 50 --window 10 \\\n"
        "    --output vectors/glove --text\n"
        "  samestep neighbors vectors/skipgram play",
    )
    add = parser.add_argument
    add("dataset", metavar="DATASET", help="the dataset's folder or address")
    add(
        "--method",
        required=True,
        choices=METHODS,
        help="word2vec's skip-gram or CBOW, GloVe, or the SVD of positive pointwise mutual "
        "information",
    )
    add("--output", required=True, metavar="FOLDER", help="a new folder")
    add("--dimensions", type=int, metavar="D", help="width of the vectors (default: 100)")
    add(
        "--window",
        type=int,
        metavar="W",
        help=f"words on each side that are the context, at most {WIDEST_WINDOW} (default: 5)",
    )
    add(
        "--units",
        choices=UNITS,
        help="what gets a vector: words, or the tokenizer's tokens, as the token embeddings of a "
        "model need (default: words)",
    )
    add("--min-count", type=int, metavar="N", help="leave out rarer words (default: 5)")
    _add_training(parser)
    add("--seed", type=int, metavar="N", help="random seed (default: 0)")
    add("--workers", type=int, default=2, metavar="N", help="threads that read (default: 2)")
    add(
        "--memory",
        default="1GB",
        metavar="SIZE",
        help="approximate memory for the counts of glove and ppmi (default: 1GB)",
    )
    add("--text", action="store_true", help="also write vectors.txt in word2vec's format")


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of training, which not all methods have."""
    add = parser.add_argument
    add(
        "--epochs",
        type=int,
        metavar="N",
        help="passes over the text (default: 5), or over the counts of GloVe (default: 25)",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help="learning rate (default: 0.025, and 0.05 for cbow and glove)",
    )
    add(
        "--negatives",
        type=int,
        metavar="K",
        help="word2vec: random words for each predicted one (default: 5)",
    )
    add(
        "--subsample",
        type=float,
        metavar="T",
        help="word2vec: skip words of a relative frequency above T at random; 0 skips none "
        "(default: 0.001)",
    )
    add(
        "--x-max",
        type=float,
        metavar="X",
        help="glove: pairs with this count or more weigh the same (default: 100)",
    )
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="predictions, or GloVe's pairs, computed with the same vectors (default: 1024)",
    )


def _vectors(args: argparse.Namespace) -> int:
    from samestep.config import parse_size
    from trainer.vectors import train

    if args.workers < 1:
        raise ConfigError(f"--workers must be at least 1, not {args.workers}")
    names = set(Settings.__dataclass_fields__) - {"method"}
    settings = Settings.of(args.method, {name: getattr(args, name) for name in names})
    train.run(
        args.dataset.rstrip("/"),
        settings,
        Path(args.output),
        workers=args.workers,
        memory=parse_size(args.memory, "--memory"),
        text=args.text,
    )
    return EXIT_DONE
