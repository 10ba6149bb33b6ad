"""Tables of sentences, in words, with a tag for each word, as CoNLL-2003 for named entities, in its
own format as well.

Tags are BIO: "B-x" begins an x, "I-x" goes on with it, "O" is in none. An "I-x" behind an "O" or
another kind, which begins an x in IOB1 data such as the original CoNLL-2003, is taken as it is; it
is for the scores to say what it means.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from data_pipeline.sources import BadRecord, TaskSource
from data_pipeline.sources.columns import brief, check_labels, index_of, items, row_of
from data_pipeline.sources.table import Problem, Split, TableConfig, TableSource, encoded
from trainer.errors import ConfigError
from trainer.examples import TaskRow
from trainer.tasks import TaskKind

_BIO = re.compile(r"O|[BI]-.+")


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, .csv, .tsv (both
            with a line of names; .tsv without quoting) or .parquet; or .conll: a word a line, its
            tag in the last of the columns, which blanks separate, and a blank line behind each
            sentence. `.gz` and `.zst` are decompressed.
        tokens: the column of the list of words; dots reach into nested objects.
        tags: the column of the list of their tags, each one of `labels`, or its index among them.
        labels: the tags, "O" among them, the others as "B-PER" and "I-PER".
    """

    tokens: str = "tokens"
    tags: str = "ner"
    labels: tuple[str, ...]
    formats: ClassVar[tuple[str, ...]] = (*TableConfig.formats, ".conll")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels, 2)
        if "O" not in self.labels:
            raise ConfigError(
                f"labels has no 'O', the tag of words in no span: {', '.join(self.labels)}"
            )
        if wrong := [label for label in self.labels if not _BIO.fullmatch(label)]:
            raise ConfigError(
                f"labels names {wrong[0]!r}, which is not BIO: 'O', or 'B-' or 'I-' and a kind"
            )

    def build(self) -> Tagging:
        """Finds the files.

        Raises:
            ConfigError: a pattern matches nothing, or a file cannot be used.
            MissingExtra: what reads them is not installed.
        """
        found = self.find()
        return Tagging(found.files, self.labels, found.first_heldout, found.parts, self)


@dataclass(frozen=True)
class Tagging(TableSource, TaskSource):
    """Reads the words of a sentence, which a blank is put between, and their tags."""

    kind: ClassVar[TaskKind] = "tagging"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.config.tokens, self.config.tags)

    def splitter(self, suffix: str) -> Split:
        return self._sentences if suffix == ".conll" else super().splitter(suffix)

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        tokens, tags = items(row, self.config.tokens), items(row, self.config.tags)
        if len(tokens) != len(tags):
            raise BadRecord(
                f"{len(tokens)} {self.config.tokens} and {len(tags)} {self.config.tags}"
            )
        words = _words(tokens)
        ends = list(itertools.accumulate(len(word) + 1 for word in words))
        spans = (
            (end - 1 - len(word), end - 1, self._index(tag))
            for word, end, tag in zip(words, ends, tags, strict=True)
        )
        return TaskRow((" ".join(words),), spans=tuple(spans))

    def _index(self, tag: object) -> int:
        if isinstance(tag, str) and not tag.isdecimal() and not _BIO.fullmatch(tag):
            raise BadRecord(f"tag {brief(tag)} is not BIO")
        return index_of(tag, self.labels, "tag")

    def _sentences(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """The sentences of a .conll file, each at its first line.

        One with a bad line is that line instead.
        """
        words, tags = list[str](), list[str]()
        first, bad = 0, None
        for number, line in enumerate(itertools.chain(file, [b""]), start=1):
            cells = line.removeprefix(b"\xef\xbb\xbf").split()
            if cells and cells[0] == b"-DOCSTART-":
                continue
            if cells:
                first = first or number
                try:
                    word, tag = self._word(cells)
                    words.append(word)
                    tags.append(tag)
                except BadRecord as error:
                    bad = bad or (number, Problem.of(str(error)))
            elif first:
                yield bad or (first, encoded({self.config.tokens: words, self.config.tags: tags}))
                words, tags, first, bad = [], [], 0, None

    def _word(self, cells: list[bytes]) -> tuple[str, str]:
        """The word and the tag of a line."""
        if len(cells) < 2:
            raise BadRecord("fewer than 2 columns")
        try:
            word, tag = cells[0].decode(), cells[-1].decode()
        except UnicodeDecodeError:
            raise BadRecord("invalid UTF-8") from None
        self._index(tag)  # here, where the line is known
        return word, tag


def _words(tokens: list[object]) -> list[str]:
    """The tokens of a sentence, which must be words: a blank is put between any two of them."""
    words = [token for token in tokens if isinstance(token, str)]
    if len(words) < len(tokens):
        wrong = next(token for token in tokens if not isinstance(token, str))
        raise BadRecord(f"word {brief(wrong)} is not text")
    if " ".join(words).split() != words:
        spaced = next(word for word in words if word.split() != [word])
        raise BadRecord(
            f"white space in the word {brief(spaced)}" if spaced.strip() else "empty word"
        )
    return words
