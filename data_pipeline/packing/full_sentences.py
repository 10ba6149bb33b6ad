"""The packing `full_sentences`: as many whole sentences as fit into an example, across documents.

Liu et al. 2019 ("RoBERTa", section 4.2, FULL-SENTENCES): examples are filled with the next
sentences, and a separator is added where a document ends. Unlike under `concat`, no sentence is
divided between two examples, unless it is longer than one; so examples end with some padding.

For example, documents of 5, 1 and 4 tokens with the sentences AA, AAA, B, CC and CC, in examples of
6 positions, with one special token before the text ([) and one after it (]):

    full_sentences  [AA]..  [AAA].  [B]CC]  [CC]..
    concat          [AAAA]  [A]B].  [CCCC]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64, PackPlan, ranges, starts
from data_pipeline.packing.documents import room_for_tokens
from samestep.examples import PackSpec


def plan(lengths: npt.ArrayLike, sentences: Int64, spec: PackSpec) -> PackPlan:
    """Packs the documents of a shard; empty documents are skipped.

    Args:
        lengths: int [D], tokens of each document.
        sentences: int [K], first token of each sentence, counted through all documents. Every
            document that is not empty starts a sentence.

    Raises:
        ConfigError: examples are too short to hold text.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    document, begin, end = _sentences(lengths, sentences, spec)
    first = _first_sentences(begin, end, room_for_tokens(spec))
    example = np.repeat(np.arange(len(first)), np.diff(first, append=len(begin)))
    # A chunk is a run of sentences with the same example and document.
    changes = (np.diff(example, prepend=-1) != 0) | (np.diff(document, prepend=-1) != 0)
    opening = np.flatnonzero(changes)
    closing = np.append(opening, len(begin))[1:] - 1
    # On the line, a document begins after the tokens and separators of those before it.
    occupied = np.where(lengths > 0, lengths + spec.suffix, 0)
    line = np.cumsum(occupied) - occupied
    chunk_begin, number = begin[opening], document[opening]
    return PackPlan(
        example_start=starts(example[opening]),
        document=number,
        begin=chunk_begin - line[number],
        length=end[closing] - chunk_begin,
        column=spec.prefix + chunk_begin - begin[first][example[opening]],
    )


def count_examples(lengths: npt.ArrayLike, sentences: Int64, spec: PackSpec) -> int:
    """Returns the number of examples of `plan`."""
    lengths = np.asarray(lengths, dtype=np.int64)
    _, begin, end = _sentences(lengths, sentences, spec)
    return len(_first_sentences(begin, end, room_for_tokens(spec)))


def _sentences(lengths: Int64, sentences: Int64, spec: PackSpec) -> tuple[Int64, Int64, Int64]:
    """The document of each sentence, and its positions [begin, end) on a line with all documents.

    The line has `suffix` positions after each document: documents of 5 and 1 tokens with sentences
    at 0, 2 and 5, and one separator, give (0, 2), (2, 5), (6, 7). A sentence that is longer than an
    example is listed as several.
    """
    room = room_for_tokens(spec)
    last_token = np.cumsum(lengths)
    document = np.searchsorted(last_token, sentences, side="right")
    size = np.diff(sentences, append=last_token[-1:])
    pieces = -(-size // room)
    offset = ranges(np.zeros_like(size), pieces) * room
    size = np.minimum(room, np.repeat(size, pieces) - offset)
    document, first = np.repeat(document, pieces), np.repeat(sentences, pieces) + offset
    # Separators of the documents before; empty ones have none.
    before = np.cumsum(lengths > 0)[document] - 1
    begin = first + spec.suffix * before
    return document, begin, begin + size


def _first_sentences(begin: Int64, end: Int64, room: int) -> Int64:
    """The first sentence of each example."""
    # For each sentence, the one after an example that would start with it. Reading means following
    # these links: 2, 2, 4, 4 from sentence 0 gives the examples 0 and 2.
    following = np.searchsorted(end, begin + room, side="right").tolist()
    first, at = [], 0
    while at < len(following):
        first.append(at)
        at = following[at]
    return np.array(first, dtype=np.int64)
