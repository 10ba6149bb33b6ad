"""The packing `pairs`: examples of two segments A and B, made of whole sentences, as BERT's next-sentence data.

This is the algorithm of google-research/bert (`create_pretraining_data.py`; Devlin et al. 2019, appendix A.2). A
document is read from its start in chunks: sentences until they fill the target length, which is all of the example's
room, or for one document in ten a random shorter one. A random number of the chunk's sentences, at least one and not
all, is A. With probability 1/2 the rest is B. Otherwise, and always when the chunk has one sentence, B comes from a
random place of another document, and the next chunk begins with the sentences that were not used. What exceeds the
room is cut from the longer segment, a token at a time, from its front or its back by the toss of a coin.

Every choice about a chunk is a hash of its first sentence, so what follows a sentence is known for all sentences of a
shard at once, and reading in chunks is to follow a line of pointers. Where a random B comes from depends on the epoch
as well, and nothing else does: a shard has the same chunks, and so as many examples, in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.packing.plans import Int64, PackPlan, ranges
from trainer.errors import ConfigError
from trainer.examples import PackSpec
from trainer.hashing import U64, combine, mix, name_key, uniform

SHORT_FRACTION = 0.1  # of the documents, whose examples are shorter than the room

_TARGET = name_key("pairs.target")
_CHUNK = name_key("pairs.chunk")
_SECOND = name_key("pairs.second")
_CUT = name_key("pairs.cut")
_WORD = 64  # coins in a hash


def plan(
    lengths: npt.ArrayLike, sentences: Int64, spec: PackSpec, key: int = 0, epoch: int = 0
) -> PackPlan:
    """Makes the examples of one shard, of two pieces each.

    Args:
        lengths: int [D], tokens of each document.
        sentences: int [K], where each sentence begins, counted in tokens through all documents; every document that
            is not empty begins with one.
        spec: cells of an example and of its special tokens.
        key: the source of all choices.
        epoch: the pass over the data.

    Returns:
        The plan, with `random` set; it has no examples when fewer than two documents have tokens, since the second
        segment of a pair has to come from another document at times.

    Raises:
        ConfigError: the examples are too short to hold two segments.
    """
    room = _room(spec)
    text = _read(np.asarray(lengths, dtype=np.int64), sentences, room, key)
    first, middle, end, random = _chunks(text, key)
    begin = np.stack((text.begin[first], text.begin[np.minimum(middle, len(text.begin) - 1)]))
    length = np.stack((text.end[middle - 1], text.end[end - 1])) - begin
    document = np.stack((text.document[first], text.document[first]))

    replaced = np.flatnonzero(random)
    document[1, replaced], begin[1, replaced], length[1, replaced] = _random_seconds(
        text, first[replaced], length[0, replaced], combine(key, _SECOND, epoch)
    )
    cut_begin, cut_length = _truncate(
        length, room, combine(key, _CUT, np.arange(2)[:, None], first)
    )
    column = np.stack((np.full(len(first), spec.prefix), spec.prefix + cut_length[0] + spec.suffix))
    return PackPlan(
        example_start=2 * np.arange(len(first) + 1),
        document=text.number[document].T.ravel(),
        begin=(begin + cut_begin - text.first_token[document]).T.ravel(),
        length=cut_length.T.ravel(),
        column=column.T.ravel(),
        random=random,
    )


def count_examples(lengths: npt.ArrayLike, sentences: Int64, spec: PackSpec, key: int = 0) -> int:
    """The number of examples of `plan`, which is the same in every epoch; the arguments are the same."""
    text = _read(np.asarray(lengths, dtype=np.int64), sentences, _room(spec), key)
    return len(_chunks(text, key)[0])


def _room(spec: PackSpec) -> int:
    room = spec.sequence_length - spec.prefix - 2 * spec.suffix
    if room < 2:
        least = spec.prefix + 2 * spec.suffix + 2
        raise ConfigError(
            f"data.sequence_length {spec.sequence_length} leaves no cells for two segments beside {least - 2} special "
            f"tokens, and data.packing pairs needs them; use at least {least}"
        )
    return room


@dataclass(frozen=True, eq=False)
class _Text:
    """The D documents of a shard that are not empty, and their K sentences; tokens are counted through them all.

    Attributes:
        number: int64 [D], the document's number in the shard.
        first_token: int64 [D].
        first_sentence: int64 [D + 1].
        target: int64 [D], tokens that the document's examples are to have.
        document: int64 [K], which of the D documents the sentence is from.
        begin, end: int64 [K], its first token, and the one after its last.
    """

    number: Int64
    first_token: Int64
    first_sentence: Int64
    target: Int64
    document: Int64
    begin: Int64
    end: Int64


def _read(lengths: Int64, sentences: Int64, room: int, key: int) -> _Text:
    """Lists the documents and sentences of a shard; none at all if there are not two documents to pair."""
    number = np.flatnonzero(lengths)
    if len(number) < 2:
        number = number[:0]
        sentences = sentences[:0]
    end_token = np.cumsum(lengths)[number]
    first_token = end_token - lengths[number]
    first_sentence = np.append(np.searchsorted(sentences, first_token), len(sentences))
    draw = combine(key, _TARGET, number)
    shorter = 2 + _below(room - 1, mix(draw))
    return _Text(
        number=number,
        first_token=first_token,
        first_sentence=first_sentence,
        target=np.where(uniform(draw) < SHORT_FRACTION, shorter, room),
        document=np.repeat(np.arange(len(number)), np.diff(first_sentence)),
        begin=sentences,
        end=np.append(sentences[1:], end_token[-1:]),
    )


def _chunks(text: _Text, key: int) -> tuple[Int64, Int64, Int64, npt.NDArray[np.bool_]]:
    """Cuts the documents into chunks.

    Returns:
        For each chunk its first sentence, the one after those of A, the one after its last, and whether B is random.
    """
    sentence = np.arange(len(text.begin))
    end = _after(text, sentence, text.target[text.document])
    draw = combine(key, _CHUNK, sentence)
    middle = sentence + 1 + _below(np.maximum(1, end - sentence - 1), draw >> np.uint64(1))
    random = (draw & np.uint64(1)).astype(np.bool_) | (middle == end)

    following = np.where(
        random, middle, end
    ).tolist()  # one document's last chunk is followed by the next one's first
    first, at = [], 0
    while at < len(following):
        first.append(at)
        at = following[at]
    chunk = np.array(first, dtype=np.int64)
    return chunk, middle[chunk], end[chunk], random[chunk]


def _after(text: _Text, sentence: Int64, tokens: Int64) -> Int64:
    """The sentence after those that, from `sentence` on, have so many tokens together or end the document."""
    reached = np.searchsorted(text.end, text.begin[sentence] + tokens) + 1
    return np.minimum(reached, text.first_sentence[text.document[sentence] + 1])


def _random_seconds(
    text: _Text, first: Int64, first_length: Int64, key: U64
) -> tuple[Int64, Int64, Int64]:
    """Segments B from anywhere: from a random sentence of a random other document, until the target is reached.

    Args:
        text: the shard's.
        first: int64 [N], the first sentence of each example's A.
        first_length: int64 [N], tokens of A.
        key: uint64 [1], differs between epochs.

    Returns:
        document, begin, length: int64 [N].
    """
    draw = combine(key, first)
    own = text.document[first]
    other = _below(max(1, len(text.number) - 1), draw)
    other += other >= own
    begin = text.first_sentence[other]
    begin = begin + _below(text.first_sentence[other + 1] - begin, mix(draw))
    end = _after(text, begin, np.maximum(1, text.target[own] - first_length))
    return other, text.begin[begin], text.end[end - 1] - text.begin[begin]


def _truncate(length: Int64, room: int, key: U64) -> tuple[Int64, Int64]:
    """Takes tokens from the longer segment (B of two equal ones) until both fit the room.

    Args:
        length: int64 [2, N], tokens of A and B.
        room: the most tokens of both.
        key: uint64 [2, N], of the coins that choose between front and back.

    Returns:
        The tokens taken from the front, and those left: int64 [2, N] each.
    """
    share = np.array(
        [[-(-room // 2)], [room // 2]]
    )  # what is left to each when both are longer than that
    left = np.minimum(length, np.maximum(share, room - length[::-1]))
    return _heads((length - left).ravel(), key.ravel()).reshape(length.shape), left


def _heads(coins: Int64, key: U64) -> Int64:
    """How many of so many fair coins show heads."""
    words = -(-coins // _WORD)
    word = ranges(np.zeros_like(words), words)
    unused = np.maximum(0, _WORD * (word + 1) - np.repeat(coins, words))
    bits = combine(np.repeat(key, words), word) >> unused.astype(np.uint64)
    heads = np.unpackbits(bits.view(np.uint8)).reshape(-1, _WORD).sum(axis=1)
    return np.bincount(np.repeat(np.arange(len(coins)), words), heads, minlength=len(coins)).astype(
        np.int64
    )


def _below(bound: npt.ArrayLike, draw: U64) -> Int64:
    """Maps hashes to [0, bound)."""
    return (draw % np.asarray(bound, dtype=np.uint64)).astype(np.int64)
