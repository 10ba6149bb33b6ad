"""Rows of a task as documents.

The tokens of their texts, and as numbers what is to be predicted of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import ShardIndex, Tokens
from data_pipeline.packing import parts
from data_pipeline.packing.plans import Int64, ranges
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.examples import Examples, Labels, PackSpec, TaskRow
from trainer.tasks import TASKS, TaskKind


@dataclass(frozen=True, eq=False)
class Encoded:
    """A document.

    Attributes:
        tokens: [T], of all its texts end to end.
        parts: int64 [texts], where each text begins.
        labels: float32 [K], as `trainer.examples.Labels.values`; empty where it is no row of a
            task.
        row: the row, with the `offsets` of its last text where labels belong to tokens.
    """

    tokens: Tokens
    parts: Int64
    labels: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    row: TaskRow | None = None


def encode(rows: Sequence[TaskRow], tokenizer: Tokenizer, kind: TaskKind) -> list[Encoded | str]:
    """Tokenises rows; where one has nothing to predict, or to predict it from, the reason stands in
    its place.
    """
    texts = list(itertools.chain.from_iterable(row.texts for row in rows))
    encoded: list[tuple[Tokens, Int64 | None]]
    if TASKS[kind].labeled != "row":
        encoded = list(tokenizer.encode_aligned(texts))
    else:
        encoded = [(tokens, None) for tokens in tokenizer.encode_batch(texts)]
    remaining = iter(encoded)
    return [_encode(row, list(itertools.islice(remaining, len(row.texts))), kind) for row in rows]


def pack(documents: Sequence[Encoded], spec: PackSpec) -> Examples:
    """Rows as examples, one each, that stand in no dataset; for a spec whose texts are `joined`.

    Args:
        documents: B of them.
        spec: length of examples, from the objective.
    """
    length = np.array([len(document.tokens) for document in documents], dtype=np.int64)
    start = np.cumsum(length) - length
    sentences = np.concatenate(
        [first + document.parts for first, document in zip(start, documents, strict=True)]
    )
    packed = parts.plan(
        ShardIndex(start, length, np.zeros((len(documents), 2), np.uint32), sentences), spec
    )
    first, number = start[packed.document] + packed.begin, np.arange(len(documents))
    tokens = np.concatenate([document.tokens for document in documents])
    zeros = np.zeros_like(number)
    return Examples(
        tokens=tokens[ranges(first, packed.length)].astype(np.int32),
        row=np.repeat(number, np.diff(packed.example_start)),
        column=packed.column,
        length=packed.length,
        key=zeros.astype(np.uint64),
        weight=np.ones(number.size, dtype=np.float32),
        isolated=False,
        labels=Labels(
            values=np.concatenate([document.labels for document in documents]),
            count=np.array([len(document.labels) for document in documents]),
            document=number,
            begin=zeros,
            examples=zeros + 1,
        ),
    )


def _encode(
    row: TaskRow, texts: Sequence[tuple[Tokens, Int64 | None]], kind: TaskKind
) -> Encoded | str:
    length = np.array([len(tokens) for tokens, _ in texts], dtype=np.int64)
    if not length.all():
        return "no tokens in a text"
    first_of_text, offsets = np.cumsum(length) - length, texts[-1][1]
    if offsets is None:
        labels = np.array(
            row.probabilities or [np.nan if row.label is None else row.label], dtype=np.float64
        )
    else:
        begin, end, tag = np.array(row.spans, dtype=np.int64).reshape(-1, 3).T
        first, last = _tokens_of(offsets, begin, end)
        if kind == "tagging":
            labels = np.full(length.sum(), -1.0)
            labels[first_of_text[-1] + first[first <= last]] = tag[first <= last]
        else:
            if (first[:1] > last[:1]).any():
                return "answer without tokens"
            labels = first_of_text[-1] + np.stack((first[:1], last[:1]), axis=1).reshape(-1).astype(
                np.float64
            )
        row = replace(row, offsets=tuple((a, b) for a, b in offsets.tolist()))
    with np.errstate(over="ignore"):
        values = labels.astype(np.float32)
    if not np.isfinite(values).all():
        return "the label is no finite number"
    return Encoded(np.concatenate([tokens for tokens, _ in texts]), first_of_text, values, row)


def _tokens_of(offsets: Int64, begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The first and the last token that share a character with each span.

    The last is before the first if none does.

    Args:
        offsets: int64 [T, 2], the characters of each token, ascending.
        begin, end: int64 [N], of the spans.
    """
    visible = np.flatnonzero(
        offsets[:, 0] < offsets[:, 1]
    )  # what is white space alone belongs to no word
    if not len(visible):
        return np.ones_like(begin), np.zeros_like(begin)
    # An empty span has no characters; it would find a token around it.
    first = np.searchsorted(offsets[visible, 1], begin, side="right")
    last = np.where(begin < end, np.searchsorted(offsets[visible, 0], end) - 1, -1)
    none = first > last
    shown = np.append(visible, len(offsets))
    return np.where(none, 1, shown[first]), np.where(none, 0, shown[np.maximum(last, 0)])
