"""`samestep augment`: rows with some words replaced, for a student to learn from (TinyBERT).

Jiao et al. 2020, algorithm 1: a masked language model proposes words for the place of each word,
and copies of a row take some of them. Here every word has one mask; the paper looks words of
several tokens up in GloVe's table.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.sources import BadRecord, Record
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.unlabeled import Unlabeled
from samestep.errors import ConfigError, DataError
from samestep.hashing import U64, combine, name_key, uniform
from samestep.progress import Progress
from samestep.storage import json_lines, shown
from trainer.accelerators.detect import for_any_shapes
from trainer.inference.fill import join_by_masks, load_masked_lm
from trainer.inference.resumable import resumable, with_sizes
from trainer.models.inputs import Inputs
from trainer.models.text_inputs import batches
from trainer.vectors.corpus import MARKS

logger = logging.getLogger(__name__)

_ROWS = 256  # read and written together; an interruption loses at most these
_LETTERS = rf"(?:[^\W\d_][{MARKS}]*)+"
_WORD = re.compile(rf"{_LETTERS}(?:'{_LETTERS})?")
_CHOICE, _WHICH = name_key("augment.choice"), name_key("augment.which")


class Settings(NamedTuple):
    """How copies are made.

    Attributes:
        copies: of each row.
        probability: that a word of a copy is replaced.
        candidates: number of words to choose from.
        seed: of the choices.
    """

    copies: int
    probability: float
    candidates: int
    seed: int


def run(
    checkpoint: str,
    file: str,
    output: Path,
    texts: tuple[str, ...],
    settings: Settings,
    batch_tokens: int,
) -> None:
    """Writes each row and its copies, or resumes where an earlier call was stopped.

    Args:
        checkpoint: of a masked language model; see `load_weights`.
        file: path, pattern or address of the rows.
        output: a new JSON Lines file.
        texts: the columns in which words are replaced.
        batch_tokens: positions of a batch, padding included.

    Raises:
        ConfigError: a setting is out of range, or the file was begun with others.
    """
    for name, value in (("copies", settings.copies), ("candidates", settings.candidates)):
        if value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    if not 0 < settings.probability <= 1:
        raise ConfigError(f"--probability must be in (0, 1], not {settings.probability}")
    if not 0 <= settings.seed < 2**64:
        raise ConfigError(f"--seed must lie in 0 .. 2**64 - 1, not {settings.seed}")
    json_lines.check_new(output, "--output")
    if templates := [text for text in texts if "{" in text]:
        raise ConfigError(f"--texts {templates[0]!r} is a template; name columns")
    source = Unlabeled.open(file, texts, {})
    augmenter = Augmenter(checkpoint, settings.candidates)
    made_of = {
        "model": augmenter.identity,
        "files": with_sizes(source.files),
        "texts": list(texts),
        "settings": list(settings),
        "batch_tokens": batch_tokens,
    }
    with resumable(output, made_of) as done, Progress("proposing words", 1.0) as progress:
        if done.records:
            logger.info("resuming after row %d", done.records)
        logger.info("proposing words on %s", augmenter.device)
        records = islice(source.records(), done.records, None)
        while read := list(islice(records, _ROWS)):
            parsed = [_texts(source, record) for record in read]
            proposed = augmenter([text for row in parsed for text in row], batch_tokens)
            lines: list[str] = []
            for number, (record, row) in enumerate(zip(read, parsed, strict=True)):
                own = proposed[number * len(texts) : (number + 1) * len(texts)]
                # By the number of the row, so a resumed call makes the same choices.
                key = combine(settings.seed, done.records + number)
                columns = row_of(record.data)
                lines.append(json_lines.line(columns))
                for changed in _copies(row, own, settings, key):
                    lines.append(json_lines.line(columns | dict(zip(texts, changed, strict=True))))
            done.add("".join(lines).encode(), len(read), len(lines))
            progress.update(read[-1].read)
    logger.info("wrote %s: %d rows, %d of them copies", output, done.rows, done.rows - done.records)


def _texts(source: Unlabeled, record: Record) -> tuple[str, ...]:
    try:
        return source.parse_row(record).texts
    except BadRecord as error:
        place = f"{shown(source.files[record.file])}:{record.line}"
        raise DataError(
            f"{place}: {error}; correct or remove the row, or name other columns with --texts"
        ) from error


def _copies(
    texts: Sequence[str], proposed: Sequence[Sequence[Sequence[str]]], settings: Settings, key: U64
) -> Iterator[list[str]]:
    """The texts of each copy of a row; `proposed` has candidates for each word of each text."""
    for copy in range(settings.copies):
        yield [
            _replaced(text, words, settings.probability, combine(key, place, copy))
            for place, (text, words) in enumerate(zip(texts, proposed, strict=True))
        ]


def _replaced(text: str, proposed: Sequence[Sequence[str]], probability: float, key: U64) -> str:
    """A copy of a text: words as `_WORD` finds them, each with its candidates."""
    words = np.arange(len(proposed))
    chosen = uniform(combine(key, _CHOICE, words)) < probability
    which = uniform(combine(key, _WHICH, words))
    found, end = [], 0
    for match, take, place, candidates in zip(
        _WORD.finditer(text), chosen, which, proposed, strict=True
    ):
        found.append(text[end : match.start()])
        word = match.group()
        # A word has no candidates if the model proposes nothing but itself.
        if take and candidates:
            word = candidates[int(place * len(candidates))]
        found.append(word)
        end = match.end()
    return "".join(found) + text[end:]


class Augmenter:
    """A masked language model that proposes words for the place of each word of a text.

    Attributes:
        identity: changes with the weights.
        device: description of the device.

    Args:
        checkpoint: see `load_weights`.
        candidates: number of words for each place.
    """

    def __init__(self, checkpoint: str, candidates: int) -> None:
        weights = load_masked_lm(checkpoint)
        self.identity = weights.identity()
        self._candidates = candidates
        self._tokenizer = weights.load_tokenizer()
        accelerator = for_any_shapes()
        self._device, self.device = accelerator.device, accelerator.description
        model = weights.model(frozenset({"tokens"}))
        self._longest = model.max_sequence_length
        self._model = model.to(self._device)
        self._words = self._whole_words()

    def _whole_words(self) -> list[str]:
        """The text of each token that is a word by itself; empty for all others."""
        vocabulary = self._tokenizer.vocabulary
        continuing = set(vocabulary.continuing or ())
        texts = [self._tokenizer.decode([token]).strip() for token in range(vocabulary.size)]
        special = set(vocabulary.special)
        return [
            text if _WORD.fullmatch(text) and token not in continuing | special else ""
            for token, text in enumerate(texts)
        ]

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_tokens: int) -> list[list[list[str]]]:
        """For each text, for each of its words: the words that the model finds most likely."""
        sequences, places, of_words = [], [], []
        for number, text in enumerate(texts):
            for match in _WORD.finditer(text):
                # The text itself may contain "[MASK]", so it is not searched for the mask.
                parts = (text[: match.start()], text[match.end() :])
                tokens, (at,) = join_by_masks(self._tokenizer, parts)
                tokens, place = self._window(tokens, at)
                sequences.append(tokens)
                places.append(place)
                of_words.append((number, match.group()))
        found: list[list[list[str]]] = [[] for _ in texts]
        if not sequences:
            return found
        proposed: list[list[str]] = [[] for _ in sequences]
        known = torch.tensor([bool(word) for word in self._words], device=self._device)
        for numbers in batches(np.array([len(each) for each in sequences]), batch_tokens):
            rows = [torch.tensor(sequences[number]) for number in numbers]
            padded = pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            real = torch.arange(padded.shape[1]) < lengths[:, None]
            predicted = torch.tensor([[places[number]] for number in numbers])
            positions = torch.arange(padded.shape[1]).expand_as(padded)
            inputs = Inputs(padded, real.int(), positions, predicted).map(
                lambda x: x.to(self._device)
            )
            logits = self._model(inputs, frozenset({"tokens"}))["tokens"][:, 0].float()
            logits = logits[:, : len(known)].masked_fill(~known, float("-inf"))
            # One more, as the word itself is often among them.
            count = min(self._candidates + 1, len(known))
            likely = logits.topk(count).indices.tolist()
            for number, tokens_of in zip(numbers.tolist(), likely, strict=True):
                own = of_words[number][1].lower()
                words = [self._words[token] for token in tokens_of if self._words[token]]
                # A word is not replaced by itself.
                others = [word for word in words if word.lower() != own]
                proposed[number] = others[: self._candidates]
        for (number, _), words in zip(of_words, proposed, strict=True):
            found[number].append(words)
        return found

    def _window(self, tokens: list[int], place: int) -> tuple[list[int], int]:
        """As many tokens around a position as the model reads, and the position among them."""
        if len(tokens) <= self._longest:
            return tokens, place
        # The first and the last token of a text are special, and stay.
        inner = self._longest - 2
        first = min(max(1, place - inner // 2), len(tokens) - 1 - inner)
        return [tokens[0], *tokens[first : first + inner], tokens[-1]], place - first + 1
