"""What the data pipeline and the objectives say to each other; neither imports the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from trainer.tasks import TASKS, Layout, TaskKind

Policy: TypeAlias = Literal["concat", "best_fit", "padded", "pairs"]

Batch: TypeAlias = dict[str, npt.NDArray[np.generic]]
"""Arrays of one micro-batch by name, every one with the examples (B) as its first dimension."""


HOST_COLUMNS = (
    "number",
    "source",
    "example",
    "epoch",
    "digest",
    "filled",
    "document",
    "begin",
    "column",
    "length",
    "examples",
)
"""Columns of a batch that say what its rows are; the host keeps them."""


@dataclass(frozen=True)
class Sides:
    """What pieces of documents take of examples that have two sides, as the inputs of an encoder and of a decoder.

    Attributes:
        size: cells of the sides.
        cost: cells that a piece of 1, 2, ... tokens takes on either side.
        joined: whether the first side holds everything, as for a decoder alone, and the second only what it predicts.
    """

    size: tuple[int, int]
    cost: tuple[tuple[int, int], ...]
    joined: bool = False


@dataclass(frozen=True)
class Parts:
    """How the texts of a task's row become an example, of one row each, or of several.

    Attributes:
        kind: of the task that the rows must be labeled for; it has a layout.
        between: special tokens between two texts of a sequence (1 for BERT's [SEP], 2 in RoBERTa).
        choices: sequences of an example; 1 but for "choices".
        stride: of windows: tokens from the begin of one to that of the next; None: they do not overlap.
        most: of windows: tokens of the first text, the rest of which is cut off.
    """

    kind: TaskKind
    between: int = 1
    choices: int = 1
    stride: int | None = None
    most: int | None = None

    @property
    def layout(self) -> Layout:
        """How the texts of a row become sequences."""
        return TASKS[self.kind].layout


@dataclass(frozen=True)
class PackSpec:
    """How many cells of an example the objective needs for itself.

    Attributes:
        sequence_length: cells of an example, special tokens included; where it has sides, the text for them.
        prefix: special tokens before a sequence (1 for [CLS]).
        suffix: special tokens after each piece of a document (1 for [SEP]).
        pairs: whether examples must be pairs of segments.
        sides: where an example has two, both of which the pieces of `best_fit` must fit into.
        text_pairs: whether documents must be pairs of texts, which go to the `sides`, whose `cost` plays no part then.
        truncate_sources, truncate_targets: of pairs of texts, leaves out the end of one that is too long.
        parts: where documents must be rows of a task; `sequence_length` is that of each of an example's sequences.
    """

    sequence_length: int
    prefix: int
    suffix: int
    pairs: bool = False
    sides: Sides | None = None
    text_pairs: bool = False
    truncate_sources: bool = False
    truncate_targets: bool = False
    parts: Parts | None = None

    @property
    def positions(self) -> int:
        """Cells of an example that a model computes, those of both sides, or of all choices."""
        if self.parts is not None:
            return self.parts.choices * self.sequence_length
        if self.sides is None:
            return self.sequence_length
        return self.sides.size[0] if self.sides.joined else sum(self.sides.size)


@dataclass(frozen=True)
class Labels:
    """What is to be predicted of B examples that are rows of a task, and where it comes from.

    Attributes:
        values: float32 [K], the numbers of all examples, end to end, each example with those of its whole row:
            classification: the index of the class among the labels; or a probability for each of them
            regression: the number
            multiple_choice: the index of the right text, from 0
            tagging: for each token of the row, the index of its tag among the labels; -1 where none is predicted
            question_answering: first and last token of the answer, counted through the row's texts; nothing where
                there is none
        count: int64 [B], how many of them are an example's.
        document: int64 [B], the row's number in its split.
        begin: int64 [B], the first token of the example's last piece, counted through the row's texts.
        examples: int64 [B], how many the whole row has become.
    """

    values: npt.NDArray[np.float32]
    count: npt.NDArray[np.int64]
    document: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    examples: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskRow:
    """A row of a task as its source gives it.

    Attributes:
        texts: that are tokenised, each by itself.
        label: of classification and multiple_choice the index, of regression the number; None for the others.
        spans: of tagging (begin, end, index of the tag) for each word, of question_answering (begin, end, 0) for each
            answer; characters of the last text.
        answers: of question_answering, the texts of the answers, that predictions are compared with.
        group: what rows share that are scored together, as the answers of a question; else what names the row, or "".
        offsets: (begin, end) for each token of the last text, its characters; filled in when the text is tokenised.
        probabilities: of classification, in place of `label`, one for each class, as of a teacher; empty otherwise.
    """

    texts: tuple[str, ...]
    label: float | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    answers: tuple[str, ...] = ()
    group: str = ""
    offsets: tuple[tuple[int, int], ...] = ()
    probabilities: tuple[float, ...] = ()


@dataclass(frozen=True)
class Examples:
    """B packed examples as flat arrays: the raw tokens of their pieces and where each piece goes.

    A piece is a run of tokens of one document. Special tokens are not in here: cells between the pieces belong to
    the objective. Under an isolating policy (`best_fit`, `padded`) each piece is a sequence of its own, with its
    own prefix, positions from 0, and attention to itself only; under `concat` and `pairs` the row is one sequence.

    Attributes:
        tokens: int32 [T], tokens of all pieces end to end, rows in order, then columns.
        row: int64 [N], the row of each piece.
        column: int64 [N], the cell of the piece's first token.
        length: int64 [N], tokens in the piece; at least 1.
        key: uint64 [B], the source of every random choice about the example; differs from epoch to epoch.
        weight: float32 [B], 1 for an example, 0 for one that only pads the batch to its static shape.
        isolated: whether pieces of a row are sequences of their own.
        random: bool [B], under `pairs`, where each row has the pieces A and B: whether B is from another document
            instead of the text after A. None under other policies.
        labels: where examples are rows of a task.
    """

    tokens: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    weight: npt.NDArray[np.float32]
    isolated: bool
    random: npt.NDArray[np.bool_] | None = None
    labels: Labels | None = None


@dataclass(frozen=True)
class Vocabulary:
    """What an objective needs to know of a tokenizer: its size and the ids of its special tokens.

    Attributes:
        size: number of ids; every id is below it.
        pad, cls, sep, mask: ids, or None where the tokenizer has no such token ([CLS] is <s> in RoBERTa).
        special: ids of special tokens, those above and [UNK], which text can produce, among them; never masked, never a
            random replacement.
        continuing: ids of tokens that go on with the word of the token before them (WordPiece's "##ing"; in byte-level
            BPE, what does not begin with a space); None where the tokenizer's kind is not known.
        eos: id of the token that ends a text: T5's </s>, GPT-2's <|endoftext|>; None where there is none.
        sentinels: ids of <extra_id_0>, <extra_id_1>, ..., which stand for spans of text; empty where there are none.
        between: how many `sep` stand between the two texts of a pair: 2 in RoBERTa.
    """

    size: int
    pad: int | None
    cls: int | None
    sep: int | None
    mask: int | None
    special: tuple[int, ...]
    continuing: tuple[int, ...] | None = None
    eos: int | None = None
    sentinels: tuple[int, ...] = ()
    between: int = 1

    @property
    def end(self) -> int | None:
        """Id of the token that ends a text for a decoder: [SEP], or where there is none, `eos`."""
        return self.eos if self.sep is None else self.sep


class LoaderState(TypedDict, total=False):
    """Where a loader stands in its data order, as checkpoints keep it; older ones lack some of it.

    Attributes:
        order, seed, lanes, window, packing, group_by_length: what the order is made from.
        mixture: shares of the sources, as [first global example, share of each source by digest].
        manifest: digest of the only source, of versions that knew no mixtures.
        example: how many examples were taken.
        excluded: ranges [first, end) of global examples that are skipped.
        corrupt: shards that are skipped: digest of the source, name, first global example.
    """

    order: int
    seed: int
    lanes: int
    window: int
    packing: str
    group_by_length: int | None
    mixture: list[list[Any]]
    manifest: str
    example: int
    excluded: Sequence[Sequence[int]]
    corrupt: Sequence[Sequence[str | int]]
