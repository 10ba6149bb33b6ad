"""`samestep generate`: texts that a trained model goes on with, or makes of others."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, TextIO

import yaml

from trainer.command import Commands, add_command, progress_bar
from trainer.config import decode
from trainer.errors import EXIT_DONE, ConfigError, DataError

if TYPE_CHECKING:
    from trainer.generation.config import Config


_BATCHES = 16  # read and sorted by length at a time

_SETTINGS = {
    "max_new_tokens": "the most tokens of a text (default: 128)",
    "min_new_tokens": "the least (default: 0)",
    "beams": "search with so many beams (default: 1, the likeliest token each time)",
    "length_penalty": "of beam search: above 1 for longer texts, below 1 for shorter ones (default: 1)",
    "early_stopping": "of beam search: true, false or never (default: false)",
    "temperature": "of sampling (default: 1)",
    "top_k": "sample among the K likeliest tokens (default: all)",
    "top_p": "sample among the likeliest tokens that together have this probability (default: 1)",
    "seed": "of sampling (default: 0)",
    "batch_size": "texts that are generated together (default: 32)",
}


def register(commands: Commands) -> None:
    """Adds `generate` to the `samestep` command."""
    parser = add_command(
        commands,
        "generate",
        _run,
        "generate texts: translate, summarise, or go on with what is given",
        'example:\n  samestep generate runs/t5 --prefix "translate English to German: " --beams 4 --input test.en \\\n'
        '    --output translations.jsonl\n  samestep generate hf://gpt2 "Once upon a" --sample',
        "Generate texts: translate, summarise, or go on with what is given. Prints one line for each text.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run or a step, its folder or address; a Hugging Face folder or hf://NAME",
    )
    parser.add_argument("text", nargs="*", help="texts (default: the lines of standard input)")
    parser.add_argument(
        "--input", metavar="FILE", help='.txt or .jsonl ({"source": TEXT}), also .gz or .zst'
    )
    parser.add_argument(
        "--output", metavar="FILE", help="a new file, of lines with source and text in JSON"
    )
    parser.add_argument(
        "--prefix", default="", help="what comes before each text, as the task's name does in T5"
    )
    parser.add_argument("--sample", action="store_true", help="draw tokens at random instead")
    for name, text in _SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, type=yaml.safe_load, default=argparse.SUPPRESS, metavar="X", help=text
        )


def _run(args: argparse.Namespace) -> int:
    from trainer.generation.config import Config

    given = {name: getattr(args, name) for name in ("sample", *_SETTINGS) if hasattr(args, name)}
    config: Config = decode(Config, given)
    if args.text and args.input:
        raise ConfigError(
            f"texts are given, and --input {args.input} besides; leave out one of them"
        )
    listed = (
        list(_checked(args.text, "the texts given"))
        if args.text
        else read(args.input)
        if args.input
        else None
    )
    texts = _checked(sys.stdin, "standard input") if listed is None else iter(listed)
    waiting = listed is None and sys.stdin.isatty()  # a person, for the answer to each line
    generator = TextGenerator(args.checkpoint, config, args.prefix)
    shown = None if args.output is None and sys.stdout.isatty() else listed
    with _output(args.output) as output, progress_bar(None if shown is None else len(shown)) as bar:
        while sources := list(islice(texts, 1 if waiting else _BATCHES * config.batch_size)):
            for source, text in zip(sources, generator(sources), strict=True):
                line = " ".join(text.splitlines())
                if args.output is not None:
                    line = json.dumps({"source": source, "text": text}, ensure_ascii=False)
                output.write(f"{line}\n")
            output.flush()
            bar.advance(bar.task_ids[0], len(sources))
    return EXIT_DONE


def read(path: str) -> list[str]:
    """The texts of a file (`.gz`, `.zst` or plain): its lines, or in JSON Lines what they hold as `source`.

    Raises:
        DataError: there is none, or a line without such a text.
    """
    return list(
        _checked(_lines(path), path)
    )  # so that a faulty line is not found after hours of work


def _lines(path: str) -> Iterator[str]:
    from data_pipeline.sources.files import read_records

    is_json = path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")
    for record in read_records((path,), lambda file: enumerate(file, start=1)):
        place = f"{path}:{record.line}"
        if record.problem is not None:
            raise DataError(f"{place}: {record.problem}; name another file, or copy it again")
        text = record.data.decode("utf-8-sig")
        yield _source(text, place) if is_json else text


def _source(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is not JSON: {error}; correct it, or give the file another name than .jsonl"
        ) from None
    text = record.get("source") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f'{place} has no text as "source"; each line is an object as {{"source": "a text"}}'
        )
    return text


def _checked(texts: Iterable[str], name: str) -> Iterator[str]:
    try:
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                raise DataError(
                    f"{name}:{number} is empty, and there is nothing to generate from; remove the line"
                )
            yield text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 ({error}); convert it, as with iconv") from None


class TextGenerator:
    """Generates texts from texts, with the model and tokenizer of a checkpoint, on the best device that there is.

    A model that was trained on sources and targets reads each text as a source, with the token that ends it; a language
    model goes on with it, from the token that texts begin with.

    Args:
        checkpoint: as of `trainer.training.weights.load_weights`.
        config: how tokens are chosen.
        prefix: what comes before each text.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: its model cannot generate.
    """

    def __init__(self, checkpoint: str, config: Config, prefix: str = "") -> None:
        from data_pipeline.tokenizers.tokenizer import Tokenizer
        from trainer.accelerators.detect import for_any_shapes
        from trainer.generation import Generator
        from trainer.training.weights import load_weights

        weights = load_weights(checkpoint)
        with weights.tokenizer_files() as folder:
            self._tokenizer = Tokenizer.load(folder)
        device = for_any_shapes().device
        self._generate = Generator(
            weights.model().to(device), self._tokenizer.vocabulary, config, device
        )
        self._prefix, self._done = prefix, 0
        end, begin = self._generate.end, self._tokenizer.vocabulary.cls
        reads_sources = weights.config.encoder_decoder or "layout" in weights.objective
        self._before, self._after = (
            ([], [end]) if reads_sources else ([end if begin is None else begin], [])
        )

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """The texts generated from these, which are numbered on from those of the call before."""
        encoded = self._tokenizer.encode_batch([self._prefix + text for text in texts])
        sources = [[*self._before, *tokens.tolist(), *self._after] for tokens in encoded]
        first, self._done = self._done, self._done + len(texts)
        return [self._tokenizer.decode(tokens) for tokens in self._generate(sources, first)]


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a new file."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115
    except FileExistsError:
        raise ConfigError(
            f"--output {path} already exists; name another file, or remove it"
        ) from None
    with file:
        yield file
