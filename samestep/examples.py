"""The contract between the data pipeline and the objectives; neither imports the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from samestep.tasks import TASKS, Layout, TaskKind

Policy: TypeAlias = Literal["concat", "full_sentences", "best_fit", "padded", "pairs"]

PairTask: TypeAlias = Literal["next", "order"]
"""What is predicted about a pair of segments: whether B follows A or is from another document, or
whether two consecutive segments are in their order or swapped."""

Batch: TypeAlias = dict[str, npt.NDArray[np.generic]]
"""Arrays of one micro-batch by name, each with the examples (B) as its first dimension."""


# Columns of a batch that describe its rows; they stay on the host.
HOST_COLUMNS = (
    *("number", "source", "example", "epoch", "digest", "filled"),
    *("document", "begin", "column", "length", "examples"),
)


@dataclass(frozen=True)
class Sides:
    """The space that chunks of documents need in examples with two sides (encoder and decoder).

    Attributes:
        size: positions of the two sides.
        cost: positions on either side that a chunk of 1, 2, ... tokens needs.
        joined: for a decoder alone: the first side holds the whole sequence, and the second only
            its predicted positions.
    """

    size: tuple[int, int]
    cost: tuple[tuple[int, int], ...]
    joined: bool = False


@dataclass(frozen=True)
class Parts:
    """How the texts of a task's row become an example, of one sequence or several.

    Attributes:
        kind: of the task that the rows must be labeled for; it has a layout.
        between: special tokens between two texts of a sequence (1 for BERT's [SEP], 2 in RoBERTa).
        choices: sequences of an example; 1 unless the layout is "choices" or "both_orders".
        stride: for windows: tokens from the start of one to the start of the next; None: they do
            not overlap.
        most: for windows: tokens of the first text; the rest is truncated.
        arrangement: how the texts become sequences; None is the usual way of the kind.
        negatives: of retrieval: the number of a row's negatives that an example has.
        query_length, passage_length: of retrieval: positions of a text with the special tokens
            around it; a longer text is truncated. None is limited by `sequence_length` alone.
        known_positives: of retrieval: the most positives of a row, whose `Labels.passages` examples
            then have; 0 leaves these out.
        score_range: of retrieval: the least and the highest score that a loss is defined for.
    """

    kind: TaskKind
    between: int = 1
    choices: int = 1
    stride: int | None = None
    most: int | None = None
    arrangement: Layout | None = None
    negatives: int = 0
    query_length: int | None = None
    passage_length: int | None = None
    known_positives: int = 0
    score_range: tuple[float, float] | None = None

    @property
    def layout(self) -> Layout:
        """How the texts of a row become sequences."""
        return self.arrangement or TASKS[self.kind].layout


@dataclass(frozen=True)
class PackSpec:
    """The layout of an example: its size, and the positions that the objective needs for itself.

    Attributes:
        sequence_length: positions of an example, special tokens included; with sides, of the text
            that fills them.
        prefix: special tokens before a sequence (1 for [CLS]).
        suffix: special tokens after each chunk of a document (1 for [SEP]).
        pairs: set if examples must be pairs of segments.
        sides: of examples with two sides; the chunks of `best_fit` must fit into both.
        text_pairs: whether documents must be pairs of texts, one for each of the `sides`; `cost`
            is not used then.
        truncate_sources, truncate_targets: of pairs of texts, truncates one that is too long.
        parts: set if documents must be rows of a task; `sequence_length` then is the length of
            each of an example's sequences.
        of_pairs: the layout of datasets of pairs of texts, if the objective reads plain text as
            well (`multi_task`).
        of_retrieval: `parts` of datasets of retrieval, if the objective reads another kind as well.
    """

    sequence_length: int
    prefix: int
    suffix: int
    pairs: PairTask | None = None
    sides: Sides | None = None
    text_pairs: bool = False
    truncate_sources: bool = False
    truncate_targets: bool = False
    parts: Parts | None = None
    of_pairs: PackSpec | None = None
    of_retrieval: Parts | None = None

    @property
    def positions(self) -> int:
        """Positions of an example that a model computes, over both sides or all choices."""
        if self.parts is not None:
            return self.parts.choices * self.sequence_length
        if self.sides is None:
            return self.sequence_length
        return self.sides.size[0] if self.sides.joined else sum(self.sides.size)


@dataclass(frozen=True)
class Labels:
    """Labels of B examples that are rows of a task.

    A long row becomes several examples (windows), each with the labels of the whole row.

    Attributes:
        values: float32 [K], the labels of all examples, end to end:
            classification: index of the class among the labels; or a probability for each of them
            regression: the number
            multiple_choice: index of the right text, from 0
            tagging: for each token of the row, index of its tag among the labels; -1 where none is
                predicted
            question_answering: first and last token of the answer, counted through the row's
                texts; nothing if there is no answer
            retrieval: a teacher's scores of the positive and the negatives; or 1, and 0 for each
                negative
        count: int64 [B], number of values of each example.
        document: int64 [B], number of the row in its split.
        begin: int64 [B], first token of the example's last chunk, counted through the row's texts.
        examples: int64 [B], number of examples that the whole row has become.
        ranks: bool [B], whether each is a row of retrieval; None if none is.
        passages: int64 [B, 1 + N + K], with K `Parts.known_positives`: which passages the example
            has, then all positives of the row, as numbers below 2^48 that differ between datasets.
            A row with fewer repeats its first passage. None if K is 0.
    """

    values: npt.NDArray[np.float32]
    count: npt.NDArray[np.int64]
    document: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    examples: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.bool_] | None = None
    passages: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class TaskRow:
    """A row of a task as its source gives it.

    Attributes:
        texts: tokenized separately.
        label: of classification and multiple_choice the index, of regression the number; None for
            the other kinds.
        spans: of tagging (begin, end, index of the tag) for each word, of question_answering
            (begin, end, 0) for each answer; in characters of the last text.
        answers: of question_answering, the answers' texts, which predictions are compared with.
        group: shared by rows that are scored together, as the answers of a question; else the name
            of the row, or "".
        offsets: (begin, end) of each token of the last text, in its characters; filled in by the
            tokenizer.
        probabilities: of classification, instead of `label`: one for each class, as a teacher
            predicts them; empty otherwise.
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
    """B packed examples as flat arrays: the raw tokens of their chunks, and where each chunk goes.

    A chunk is a run of tokens of one document. Special tokens are not included: the objective fills
    the positions between the chunks. Under an isolating policy (`best_fit`, `padded`) each chunk is
    a sequence of its own, with its own prefix, positions from 0, and attention to itself only.
    Under `concat`, `full_sentences` and `pairs` the row is one sequence.

    Two examples of length 8 under `best_fit`, with one [CLS] and one [SEP] for each chunk: chunks
    of 2 and 2 tokens in the first row, 4 in the second, give row [0, 0, 1], column [1, 5, 1] and
    length [2, 2, 4].

    Attributes:
        tokens: int32 [T], tokens of all chunks end to end, by row, then column.
        row: int64 [N], the row of each chunk.
        column: int64 [N], the position of the chunk's first token.
        length: int64 [N], number of tokens of the chunk; at least 1.
        key: uint64 [B], the source of every random choice about the example; differs from epoch to
            epoch.
        weight: float32 [B], 1 for an example, 0 for a row that only pads the batch to its static
            shape.
        isolated: whether the chunks of a row are sequences of their own.
        random: bool [B], under `pairs`, where each row has the chunks A and B: whether B is not the
            text after A (see `PairTask`). None under other policies.
        paired: bool [B], whether the chunks of a row are sources and targets in turn; None if it is
            unknown, as in a plan.
        labels: set if examples are rows of a task.
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
    paired: npt.NDArray[np.bool_] | None = None


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
"""Files that the folder of a tokenizer may have."""


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a tokenizer that an objective needs: its size and its special tokens.

    Attributes:
        size: number of ids; every id is below it.
        pad, cls, sep, mask: ids, or None if the tokenizer has no such token ([CLS] is <s> in
            RoBERTa).
        special: ids of special tokens, those above and [UNK] (which text can produce) included;
            never masked, never a random replacement.
        continuing: ids of tokens that continue the word of the token before them (WordPiece's
            "##ing"; in byte-level BPE, tokens that do not begin with a space); None if the
            tokenizer's kind is unknown.
        eos: id of the token that ends a text: T5's </s>, GPT-2's <|endoftext|>; None if there is
            none.
        sentinels: ids of <extra_id_0>, <extra_id_1>, ..., which stand for spans of text; may be
            empty.
        between: number of `sep` between the two texts of a pair: 2 in RoBERTa.
        full_stops: ids of the tokens that are a full stop, after a space and without; may be empty.
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
    full_stops: tuple[int, ...] = ()

    @property
    def end(self) -> int | None:
        """Id of the token that ends a text for a decoder: [SEP], or else `eos`."""
        return self.eos if self.sep is None else self.sep


class LoaderState(TypedDict, total=False):
    """Position of a loader in its data order, in a checkpoint; older ones lack some keys.

    Attributes:
        order, seed, lanes, window, packing, group_by_length, group_by_source: what determines the
            order.
        mixture: weights of the sources, as [first global example, weight of each source by digest].
        manifest: digest of the only source, in versions without mixtures.
        example: number of examples taken.
        excluded: ranges [first, end) of global examples that are skipped.
        corrupt: skipped shards: digest of the source, name, first global example.
    """

    order: int
    seed: int
    lanes: int
    window: int
    packing: str
    group_by_length: int | None
    group_by_source: int | None
    mixture: list[list[Any]]
    manifest: str
    example: int
    excluded: Sequence[Sequence[int]]
    corrupt: Sequence[Sequence[str | int]]
