"""`samestep generate`: texts generated from prompts or source texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TextIO

from data_pipeline.sources.files import read_records
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.accelerators.detect import for_any_shapes
from trainer.command import progress_bar
from trainer.errors import ConfigError, DataError
from trainer.generation import Generator
from trainer.generation.config import Config
from trainer.training.weights import load_weights

# The generator sorts the texts of a call by length. More batches per call mean less padding, and
# a longer wait for the first line of output.
_BATCHES_PER_CALL = 16


class TextGenerator:
    """Generates texts with the model and tokenizer of a checkpoint, on the best device available.

    A model trained on sources and targets reads each text as a source, followed by the end token.
    A language model continues the text, which follows the token that starts training examples.

    Args:
        checkpoint: see `trainer.training.weights.load_weights`.
        config: how tokens are chosen.
        prefix: prepended to each text.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: its model cannot generate.
    """

    def __init__(self, checkpoint: str, config: Config, prefix: str = "") -> None:
        weights = load_weights(checkpoint)
        with weights.tokenizer_files() as folder:
            self._tokenizer = Tokenizer.load(folder)
        device = for_any_shapes().device
        model = weights.model().to(device)
        vocabulary = self._tokenizer.vocabulary
        self._generate = Generator(model, vocabulary, config, device)
        self._prefix = prefix
        self._done = 0
        end = self._generate.end
        if weights.config.encoder_decoder or "layout" in weights.objective:
            self._before, self._after = [], [end]
        else:
            self._before, self._after = [end if vocabulary.cls is None else vocabulary.cls], []

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Returns the generated texts. Texts are numbered across calls, which keys sampling."""
        encoded = self._tokenizer.encode_batch([self._prefix + text for text in texts])
        sources = [[*self._before, *tokens.tolist(), *self._after] for tokens in encoded]
        first = self._done
        self._done += len(texts)
        return [self._tokenizer.decode(tokens) for tokens in self._generate(sources, first)]


def write(
    generator: TextGenerator, given: Sequence[str] | None, path: str | None, batch_size: int
) -> None:
    """Generates texts and writes each as soon as its group of batches is done.

    Args:
        generator: generates the texts.
        given: the source texts; None reads the lines of standard input.
        path: a new JSON Lines file; None prints one line for each text.
        batch_size: number of texts generated together.
    """
    texts = _checked(sys.stdin, "standard input") if given is None else iter(given)
    # At a terminal somebody types lines and waits for each answer.
    interactive = given is None and sys.stdin.isatty()
    group = 1 if interactive else _BATCHES_PER_CALL * batch_size
    # A progress bar would be mixed with texts printed to the same terminal.
    prints_to_terminal = path is None and sys.stdout.isatty()
    total = None if given is None or prints_to_terminal else len(given)
    with _output(path) as output, progress_bar(total) as bar:
        while sources := list(islice(texts, group)):
            for source, text in zip(sources, generator(sources), strict=True):
                if path is None:
                    line = " ".join(text.splitlines())
                else:
                    line = json.dumps({"source": source, "text": text}, ensure_ascii=False)
                output.write(f"{line}\n")
            output.flush()
            bar.advance(bar.task_ids[0], len(sources))


def read(path: str) -> list[str]:
    """Reads the texts of a file: its lines, or the `source` field of JSON Lines.

    The whole file is read before the model is loaded, so that a bad line is found at once.

    Raises:
        DataError: the file cannot be read, or a line has no text.
    """
    return checked(_lines(path), path)


def checked(texts: Iterable[str], name: str) -> list[str]:
    """Returns the texts without line endings.

    Raises:
        DataError: a text is empty or not UTF-8; the error names it by `name` and line number.
    """
    return list(_checked(texts, name))


def _lines(path: str) -> Iterator[str]:
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
            f"{place} is not JSON: {error}; correct it, or rename the file to .txt"
        ) from None
    text = record.get("source") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{place} has no text as "source"; write each line as {{"source": TEXT}}')
    return text


def _checked(texts: Iterable[str], name: str) -> Iterator[str]:
    try:
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                raise DataError(f"{name}:{number} is empty; remove the line")
            yield text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 ({error}); convert it, as with iconv") from None


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    """Opens standard output, or a new file."""
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
