"""The commands `samestep embed`, `search` and `mine`, and the options of poolings.

`samestep --help` imports this module, so each command imports its modules when it runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from samestep.command import Commands, add_command, add_processes
from samestep.errors import EXIT_DONE, ConfigError

_CHECKPOINT = "a run, a step of it, a Hugging Face folder or hf://NAME"
_TEXTS = (
    'texts, one a line, or .jsonl, also compressed. The id of a text is its "_id", or else the '
    'number of its line; a "title" comes before the text'
)

_OPTIONS = {
    "pool": "pool",
    "normalize": "normalize",
    "longest": "max_length",
    "query": "query_prompt",
    "default": "query_prompt",
    "document": "document_prompt",
}
"""Names of options by attribute of `sentences.Pooling`."""


def register_embed(commands: Commands) -> None:
    """Adds `samestep embed`."""
    parser = add_command(
        commands,
        "embed",
        _embed,
        "write one vector of each text, to search among them",
        "Pooling, normalization, prompts and length of a sentence-transformers folder are used.\n"
        "If it is stopped, the same command goes on. Vectors are the same with any number of "
        "processes.\n\n"
        "examples:\n"
        "  samestep embed hf://sentence-transformers/all-MiniLM-L6-v2 corpus.jsonl.zst "
        "--output vectors\n"
        "  samestep search hf://sentence-transformers/all-MiniLM-L6-v2 vectors queries.txt --top 5",
        "Write one vector of each text, to search among them.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    add("file", metavar="FILE", help=_TEXTS)
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the vectors")
    add("--field", metavar="NAME", help=".jsonl: key of the text (default: text)")
    roles = ("query", "document")
    add("--role", choices=roles, default="document", help="chooses the prompt (default: document)")
    numbers = ("float32", "float16", "int8")
    help_ = "type of the stored numbers; int8 has a scale for each vector (default: float16)"
    add("--dtype", choices=numbers, default="float16", help=help_)
    help_ = "texts of each .npy; an interruption loses the current one (default: 16384)"
    add("--texts-per-file", type=int, default=16384, metavar="N", help=help_)
    help_ = "tokens computed at a time (default: 8192)"
    add("--batch-tokens", type=int, default=8192, metavar="N", help=help_)
    add_pooling(parser)
    add_processes(parser)


def register_search(commands: Commands) -> None:
    """Adds `samestep search`."""
    parser = add_command(
        commands,
        "search",
        _search,
        "find the texts nearest to each query in a folder of samestep embed",
        "The search is exact. Prints a line of JSON for each query, with ids and similarities.\n\n"
        "examples:\n"
        "  samestep search runs/embeddings vectors queries.jsonl --top 100 --output found.jsonl\n"
        '  echo "heat conduction" > query.txt; samestep search runs/embeddings vectors query.txt',
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="the model that made the vectors")
    add("folder", type=Path, metavar="DIR", help="a folder of samestep embed")
    add("file", metavar="QUERIES", help=_TEXTS)
    add("--field", metavar="NAME", help=".jsonl: key of the text (default: text)")
    add("--top", type=int, default=10, metavar="K", help="texts of each query (default: 10)")
    add("--output", type=Path, metavar="FILE", help="a new .jsonl, .jsonl.gz or .jsonl.zst")
    _add_prompts(parser.add_argument_group("queries (default: as samestep embed was run)"))


def register_mine(commands: Commands) -> None:
    """Adds `samestep mine`."""
    parser = add_command(
        commands,
        "mine",
        _mine,
        "choose hard negatives of each query, to train an embedding model or a reranker",
        "All passages are ranked for each query, without its positives. Writes a line of JSON for\n"
        "each query: query, positive, negatives, and their ids. If it is stopped, the same\n"
        "command goes on. The output is the same with any number of processes.\n\n"
        "examples:\n"
        "  samestep mine runs/embeddings beir/nfcorpus --output hard.jsonl --relative-margin 0.05\n"
        "  samestep mine hf://sentence-transformers/all-MiniLM-L6-v2 pairs.jsonl "
        "--passages corpus.jsonl \\\n"
        "    --output hard.jsonl.zst --range 10-100 --choose random --teacher runs/reranker",
        "Choose hard negatives of each query: passages that the model ranks high.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    help_ = "a folder in BEIR's layout, or .jsonl of query and positive (a text, or a list of them)"
    add("data", metavar="DATA", help=help_)
    help_ = "a new .jsonl, .jsonl.gz or .jsonl.zst"
    add("--output", required=True, type=Path, metavar="FILE", help=help_)
    add("--split", metavar="NAME", help="of a folder: qrels/NAME.tsv (default: train)")
    help_ = (
        "of .jsonl: all passages, .jsonl of _id and text; a positive is the id or the text of one "
        "(default: the positives of all rows are the passages)"
    )
    add("--passages", metavar="FILE", help=help_)
    add("--negatives", type=int, default=8, metavar="N", help="of each query (default: 8)")
    help_ = (
        "A-B: leave out the A nearest passages, which may be positives that nobody marked, and "
        "choose up to rank B; positives have no rank (default: 30-200)"
    )
    add("--range", default="30-200", metavar="A-B", help=help_)
    help_ = "leave out passages that score above the lowest positive - X"
    add("--margin", type=float, metavar="X", help=help_)
    help_ = "leave out passages above the lowest positive, less this share of it, such as 0.05"
    add("--relative-margin", type=float, metavar="X", help=help_)
    help_ = "the nearest of the passages that are left, or random ones (default: highest)"
    add("--choose", choices=("highest", "random"), default="highest", help=help_)
    add("--seed", type=int, metavar="N", help="of --choose random (default: 0)")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--scores", action="store_true", help="write similarities too")
    help_ = "write scores of this cross-encoder: a run of objective regression, or a folder"
    of.add_argument("--teacher", metavar="CKPT", help=help_)
    help_ = "queries with fewer negatives: stop, keep or skip them (default: error)"
    add("--fewer", choices=("error", "keep", "skip"), default="error", help=help_)
    add_pooling(parser)
    add_processes(parser)


def add_pooling(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `pooling_of`."""
    group = parser.add_argument_group("vectors (default: as the model's folder says, else a mean)")
    add = group.add_argument
    pools = ("mean", "first", "last", "max", "weighted")
    add("--pool", choices=pools, help="of the hidden states; weighted counts token i i times")
    help_ = "whether vectors have length 1"
    add("--normalize", action=argparse.BooleanOptionalAction, help=help_)
    add("--document-prompt", metavar="TEXT", help="prepended to documents")
    _add_prompts(group)


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-length", type=int, metavar="N", help="tokens of a text, special ones included")
    help_ = "prepended to queries, and to the texts of samestep evaluate --sts"
    add("--query-prompt", metavar="TEXT", help=help_)


def pooling_of(args: argparse.Namespace) -> dict[str, object]:
    """The attributes of `sentences.Pooling` that the options of `add_pooling` set.

    Raises:
        ConfigError: a length is not positive.
    """
    if args.max_length is not None and args.max_length < 1:
        raise ConfigError(f"--max-length must be at least 1, not {args.max_length}")
    options = vars(args)
    given = {name: options.get(option) for name, option in _OPTIONS.items()}
    return {name: value for name, value in given.items() if value is not None}


def _embed(args: argparse.Namespace) -> int:
    from samestep.cli import main
    from trainer.elastic import agent
    from trainer.elastic.cli import processes_to_start
    from trainer.inference.retrieval.embed import Output, embed
    from trainer.inference.retrieval.vectors import MOST_PART

    for name in ("batch_tokens", "texts_per_file"):
        if not 1 <= (value := getattr(args, name)) <= MOST_PART:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be from 1 to {MOST_PART}, not {value}")
    if (processes := processes_to_start(args, None)) > 1:
        return agent.run_workers(main, args.typed, processes)
    embed(
        args.checkpoint,
        args.file,
        args.field,
        Output(args.output, args.dtype, args.texts_per_file),
        role=args.role,
        given=pooling_of(args),
        batch_tokens=args.batch_tokens,
    )
    return EXIT_DONE


def _mine(args: argparse.Namespace) -> int:
    from samestep.cli import main
    from samestep.storage import json_lines
    from trainer.elastic import agent
    from trainer.elastic.cli import processes_to_start
    from trainer.inference.retrieval.jobs import processes as joined
    from trainer.inference.retrieval.mine import Output, mine
    from trainer.inference.retrieval.negatives import Choice
    from trainer.inference.retrieval.pairs import Pairs

    is_folder = Path(args.data).is_dir()
    if is_folder and args.passages is not None:
        raise ConfigError(f"--passages is for .jsonl, and {args.data} is a folder with its own")
    if args.split is not None and not is_folder:
        raise ConfigError(f"--split is for a folder in BEIR's layout, and {args.data} is none")
    if args.seed is not None and args.choose != "random":
        raise ConfigError("--seed needs --choose random")
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", args.range)
    if found is None:
        raise ConfigError(f"--range must be A-B, such as 30-200, not {args.range!r}")
    choice = Choice(
        args.negatives,
        skipped=int(found[1]),
        last=int(found[2]),
        margin=args.margin,
        relative_margin=args.relative_margin,
        how=args.choose,
        seed=args.seed or 0,
    )
    given = pooling_of(args)
    json_lines.check_new(args.output, "--output")
    if (processes := processes_to_start(args, None)) > 1:
        return agent.run_workers(main, args.typed, processes)
    with joined() as world:
        if is_folder:
            pairs = Pairs.of_collection(Path(args.data), args.split or "train")
        else:
            pairs = Pairs.of_rows(args.data, args.passages)
        mine(
            args.checkpoint,
            pairs,
            Output(args.output, args.scores, args.teacher, args.fewer),
            choice,
            given,
            world,
        )
    return EXIT_DONE


def _search(args: argparse.Namespace) -> int:
    from samestep.storage import json_lines
    from trainer.inference.retrieval.embed import search

    if args.top < 1:
        raise ConfigError(f"--top must be at least 1, not {args.top}")
    if args.output is not None:
        json_lines.check_new(args.output, "--output")
    options = (args.top, pooling_of(args))
    found = search(args.checkpoint, args.folder, args.file, args.field, *options)
    if args.output is not None:
        json_lines.write(args.output, found)
        return EXIT_DONE
    for row in found:
        sys.stdout.write(json_lines.line(row))
    return EXIT_DONE
