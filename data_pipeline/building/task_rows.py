"""Rows of a task as documents: the tokens of their texts, and their labels as numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import ShardIndex, Tokens
from data_pipeline.packing import Int64, ranges, task_rows
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.examples import Examples, Labels, PackSpec, TaskRow
from samestep.tasks import TASKS, TaskKind


@dataclass(frozen=True, eq=False)
class Encoded:
    """A document.

    Attributes:
        tokens: [T], of all its texts, one after the other.
        parts: int64 [texts], the first token of each text.
        labels: float32 [K], as `samestep.examples.Labels.values`; empty unless it is a row of a
            task.
        row: the row, with the `offsets` of its last text if labels belong to tokens.
    """

    tokens: Tokens
    parts: Int64
    labels: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    row: TaskRow | None = None


def join(texts: Sequence[Tokens]) -> Encoded:
    """Concatenates the tokens of texts; empty texts are no parts.

    Texts of 3, 0 and 2 tokens have the parts [0, 3].
    """
    length = np.array([len(text) for text in texts])
    return Encoded(np.concatenate(texts), (np.cumsum(length) - length)[length > 0])


def encode(rows: Sequence[TaskRow], tokenizer: Tokenizer, kind: TaskKind) -> list[Encoded | str]:
    """Tokenizes rows; a row without texts or labels to train on becomes the reason for that."""
    texts = list(itertools.chain.from_iterable(row.texts for row in rows))
    encoded: list[tuple[Tokens, Int64 | None]]
    if TASKS[kind].labeled != "row":
        encoded = list(tokenizer.encode_aligned(texts))
    else:  # no label needs an offset, and encoding without them is faster
        encoded = [(tokens, None) for tokens in tokenizer.encode_batch(texts)]
    remaining = iter(encoded)
    return [_encode(row, list(itertools.islice(remaining, len(row.texts))), kind) for row in rows]


def pack(documents: Sequence[Encoded], spec: PackSpec) -> Examples:
    """Packs rows that are in no dataset into examples: one each, or several windows.

    Args:
        documents: B of them.
        spec: from the objective.
    """
    tokens = np.concatenate([document.tokens for document in documents])
    length = np.array([len(document.tokens) for document in documents], dtype=np.int64)
    start = np.cumsum(length) - length
    texts = [first + document.parts for first, document in zip(start, documents, strict=True)]
    origin = np.zeros((len(documents), 2), np.uint32)
    packed = task_rows.plan(ShardIndex(start, length, origin, np.concatenate(texts)), spec)
    document = packed.document[packed.example_start[:-1]]
    last = packed.example_start[1:] - 1
    values = [documents[number].labels for number in document.tolist()]
    return Examples(
        tokens=tokens[ranges(start[packed.document] + packed.begin, packed.length)].astype(
            np.int32
        ),
        row=np.repeat(np.arange(document.size), np.diff(packed.example_start)),
        column=packed.column,
        length=packed.length,
        key=np.zeros(document.size, dtype=np.uint64),
        weight=np.ones(document.size, dtype=np.float32),
        isolated=False,
        labels=Labels(
            values=np.concatenate(values),
            count=np.array([len(each) for each in values]),
            document=document,
            begin=packed.begin[last],
            examples=np.bincount(document)[document],
        ),
    )


def _encode(
    row: TaskRow, texts: Sequence[tuple[Tokens, Int64 | None]], kind: TaskKind
) -> Encoded | str:
    document = join([tokens for tokens, _ in texts])
    if len(document.parts) < len(texts):
        return "no tokens in a text"
    offsets = texts[-1][1]
    if offsets is None:
        label = np.nan if row.label is None else row.label
        labels = np.array(row.probabilities or [label], dtype=np.float64)
    else:
        begin, end, tag = np.array(row.spans, dtype=np.int64).reshape(-1, 3).T
        first, last = _tokens_of(offsets, begin, end)
        before = document.parts[-1]  # offsets and spans are of the last text
        if kind == "tagging":
            # The first token of a word has its tag. Words without tokens are left out.
            labels = np.full(len(document.tokens), -1.0)
            labels[before + first[first <= last]] = tag[first <= last]
        elif (first[:1] > last[:1]).any():
            return "answer without tokens"
        else:  # the first of several answers, or nothing if there is none
            labels = (before + np.append(first[:1], last[:1])).astype(np.float64)
        row = replace(row, offsets=tuple((a, b) for a, b in offsets.tolist()))
    with np.errstate(over="ignore"):
        values = labels.astype(np.float32)
    if not np.isfinite(values).all():
        return "the label is no finite number"
    return replace(document, labels=values, row=row)


def _tokens_of(offsets: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Returns the first and the last token that share a character with each span.

    The last one is before the first if no token does. In "a  bc" with the tokens (0, 1), (1, 2) for
    a space and (3, 5), the span (3, 4) has the tokens 2 and 2, and (1, 2) has the tokens 1 and 0.

    Args:
        offsets: int64 [T, 2], the characters of each token, ascending.
        begin, end: int64 [N], of the spans.
    """
    visible = np.flatnonzero(offsets[:, 0] < offsets[:, 1])  # white space belongs to no word
    if not len(visible):
        return np.ones_like(begin), np.zeros_like(begin)
    first = np.searchsorted(offsets[visible, 1], begin, side="right")
    # An empty span has no characters, but the search would find a token around it.
    last = np.where(begin < end, np.searchsorted(offsets[visible, 0], end) - 1, -1)
    # From numbers among the visible tokens to numbers among all of them.
    none = first > last
    shown = np.append(visible, len(offsets))
    return np.where(none, 1, shown[first]), np.where(none, 0, shown[np.maximum(last, 0)])
