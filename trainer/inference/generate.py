"""`samestep generate`: texts generated from prompts or source texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TextIO

from samestep.errors import ConfigError, DataError
from samestep.progress import Progress
from trainer.accelerators.detect import for_any_shapes
from trainer.generation import Generator
from trainer.generation.config import Config
from trainer.training.weights.loading import load_weights

# The generator sorts the texts of a call by length. More batches per call mean less padding, and
# a longer wait for the first line of output.
_BATCHES_PER_CALL = 16


class TextGenerator:
    """Generates texts with the model and tokenizer of a checkpoint, on the best device available.

    A model trained on sources and targets reads each text as a source, followed by the end token.
    A language model continues the text, which follows the token that starts training examples.
    Sentinels in a text, such as <extra_id_0>, are tokens.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        config: how tokens are chosen.
        prefix: prepended to each text.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: its model cannot generate.
    """

    def __init__(self, checkpoint: str, config: Config, prefix: str) -> None:
        weights = load_weights(checkpoint)
        self._tokenizer = weights.load_tokenizer()
        vocabulary = self._tokenizer.vocabulary
        device = for_any_shapes().device
        self._generate = Generator(weights.model().to(device), vocabulary, config, device)
        self._prefix = prefix
        self._done = 0
        end = self._generate.end
        self._after = [end] if weights.generates_targets else []
        start = end if vocabulary.cls is None else vocabulary.cls
        self._before = [] if weights.generates_targets else [start]

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Returns the generated texts. Texts are numbered across calls, which keys sampling."""
        encoded = self._tokenizer.encode_prompts([self._prefix + text for text in texts])
        sources = [[*self._before, *tokens.tolist(), *self._after] for tokens in encoded]
        # Sampling is keyed by the text's number, so batches do not change what is generated.
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
    texts = checked(sys.stdin, "standard input") if given is None else iter(given)
    # At a terminal somebody types lines and waits for each answer.
    interactive = given is None and sys.stdin.isatty()
    group = 1 if interactive else _BATCHES_PER_CALL * batch_size
    # A progress bar would be mixed with texts printed to the same terminal.
    prints_to_terminal = path is None and sys.stdout.isatty()
    total = None if given is None or prints_to_terminal else len(given)
    with _output(path) as output, Progress("generating", total) as progress:
        while sources := list(islice(texts, group)):
            for source, text in zip(sources, generator(sources), strict=True):
                line = " ".join(text.splitlines())
                if path is not None:
                    line = json.dumps({"source": source, "text": text}, ensure_ascii=False)
                output.write(f"{line}\n")
            # A reader of a pipe, or of the file of a killed process, has all complete groups.
            output.flush()
            progress.advance(len(sources))


def checked(texts: Iterable[str], name: str) -> Iterator[str]:
    """Yields the texts without line endings.

    Raises:
        DataError: a text is empty or not UTF-8; the error names it by `name` and line number.
    """
    try:
        for number, text in enumerate(texts, start=1):
            if not text.strip():
                raise DataError(f"{name}:{number} is empty; remove the line")
            text.encode()  # Python makes surrogates of other bytes, as in arguments
            yield text.rstrip("\r\n")
    except UnicodeError as error:
        raise DataError(f"{name} is not UTF-8 ({error}); convert it, as with iconv") from error


def _output(path: str | None) -> AbstractContextManager[TextIO]:
    """Standard output, which stays open, or a new file."""
    if path is None:
        return nullcontext(sys.stdout)
    # "x" fails where the file exists, without a moment in which another process could create it.
    try:
        return open(path, "x", encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(
            f"--output {path} already exists; name another file, or remove it"
        ) from error
