"""Tables of sentences, as lists of words, with a tag for each word, as CoNLL-2003 for named
entities; also in the format of CoNLL.

Tags are BIO: "B-x" begins an x, "I-x" continues it, "O" is outside of any. An "I-x" after an "O" or
after another kind begins an x in IOB1 data such as the original CoNLL-2003. It is kept as it is:
the metrics define its meaning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from data_pipeline.sources import BadRecord, Problem, TaskSource
from data_pipeline.sources.columns import brief, check_labels, index_of, items, row_of
from data_pipeline.sources.files import Split
from data_pipeline.sources.kinds.jsonl import encoded
from data_pipeline.sources.table import TableConfig, TableSource
from samestep.errors import ConfigError
from samestep.examples import TaskRow
from samestep.tasks import TaskKind

_BIO = re.compile(r"O|[BI]-.+")


@dataclass(frozen=True, kw_only=True)
class Config(TableConfig):
    """Where the rows are, and which columns they have.

    Attributes:
        paths: files, glob patterns or URLs of the rows to train on: .jsonl, .json, .csv, .tsv (both
            with a header line; .tsv without quoting) or .parquet; or .conll: one word per line, its
            tag in the last of the columns, which spaces separate, and a blank line after each
            sentence. `.gz`, `.bz2`, `.xz` and `.zst` are decompressed.
        tokens: column with the list of words; dots reach into nested objects.
        tags: column with the list of their tags, each one of `labels`, or its index among them.
        labels: the tags, "O" among them, the others as "B-PER" and "I-PER".
    """

    tokens: str = "tokens"
    tags: str = "ner"
    labels: tuple[str, ...]
    formats: ClassVar[tuple[str, ...]] = (*TableConfig.formats, ".conll")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.labels)
        if "O" not in self.labels:
            raise ConfigError(
                f"labels has no 'O': {', '.join(self.labels)}. Add it: it is the tag of words "
                "outside of any span."
            )
        if wrong := [label for label in self.labels if not _BIO.fullmatch(label)]:
            raise ConfigError(
                f"labels names {wrong[0]!r}, which is not BIO. Use 'O', or 'B-' or 'I-' and a kind."
            )

    def build(self) -> Tagging:
        """Finds the files."""
        return Tagging(**self.find(), labels=self.labels, config=self)


@dataclass(frozen=True)
class Tagging(TableSource, TaskSource):
    """Reads the words of a sentence, joined by spaces, and their tags."""

    kind: ClassVar[TaskKind] = "tagging"
    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.config.tokens, self.config.tags)

    @property
    def numbered(self) -> Mapping[str, tuple[str, ...]]:
        return {self.config.tags: self.labels}

    def splitter(self, suffix: str) -> Split:
        return self._sentences if suffix == ".conll" else super().splitter(suffix)

    def decode_row(self, data: bytes) -> TaskRow:
        row = row_of(data)
        tokens, tags = items(row, self.config.tokens), items(row, self.config.tags)
        if len(tokens) != len(tags):
            raise BadRecord(
                f"{self.config.tokens} and {self.config.tags} differ in number: {len(tokens)} and "
                f"{len(tags)}"
            )
        words = _words(tokens)
        # "Jo ran" with the tags B-PER and O has the spans (0, 2, 1) and (3, 6, 0).
        spans, begin = [], 0
        for word, tag in zip(words, tags, strict=True):
            spans.append((begin, begin + len(word), self._index(tag)))
            begin += len(word) + 1
        return TaskRow((" ".join(words),), spans=tuple(spans))

    def _index(self, tag: object) -> int:
        # "4" is an index, as CSV writes it.
        if isinstance(tag, str) and not tag.isdecimal() and not _BIO.fullmatch(tag):
            raise BadRecord(f"tag is not BIO: {brief(tag)}")
        return index_of(tag, self.labels, "tag")

    def _sentences(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yields the sentences of a .conll file: runs of lines that are not blank."""
        # Files begin with "-DOCSTART- -X- O O" and a blank line, and so does each document in them:
        #   -DOCSTART- O | (blank) | Jo B-PER | ran O | (blank) | Bonn B-LOC
        # has the sentences "Jo ran", at line 3, and "Bonn", at line 6.
        lines = (line.removeprefix(b"\xef\xbb\xbf").split() for line in file)
        numbered = (
            (number, fields)
            for number, fields in enumerate(lines, start=1)
            if fields[:1] != [b"-DOCSTART-"]
        )
        for is_sentence, group in itertools.groupby(numbered, lambda line: bool(line[1])):
            if is_sentence:
                yield self._sentence(list(group))

    def _sentence(self, lines: list[tuple[int, list[bytes]]]) -> tuple[int, bytes]:
        """Returns a sentence at its first line, or a Problem at its first bad line."""
        words, tags = list[str](), list[str]()
        for number, fields in lines:
            try:
                if len(fields) < 2:
                    raise BadRecord("fewer than 2 columns")
                words.append(fields[0].decode())
                tags.append(fields[-1].decode())
                # A bad tag is found again when the row is decoded, but without its line.
                self._index(tags[-1])
            except UnicodeDecodeError:
                return number, Problem.of("invalid UTF-8")
            except BadRecord as error:
                return number, Problem.of(str(error))
        return lines[0][0], encoded({self.config.tokens: words, self.config.tags: tags})


def _words(tokens: list[object]) -> list[str]:
    """Checks that tokens are words: joined by spaces, they must remain apart."""
    words = list[str]()
    for token in tokens:
        if not isinstance(token, str):
            raise BadRecord(f"a word is not text: {brief(token)}")
        words.append(token)
    # Words are joined by spaces, and spans are counted in the joined text. A word with a space
    # inside would be two words to a reader of that text.
    for word in words:
        if word.split() != [word]:
            blank = "empty word" if not word.strip() else f"white space in a word: {brief(word)}"
            raise BadRecord(blank)
    return words
