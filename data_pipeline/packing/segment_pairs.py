"""The packing `pairs`: two segments A and B of whole sentences, for next-sentence prediction or
sentence order.

This is the algorithm of google-research/bert (`create_pretraining_data.py`; Devlin et al. 2019,
appendix A.2). A document is read from its start in chunks: sentences until they reach the target
length, which is the whole example, or for one document in ten a random shorter length. A is a
random number of the chunk's sentences, at least one and not all. With probability 1/2, B is the
rest of the chunk. Otherwise, and always if the chunk has one sentence, B comes from a random place
of another document, and the next chunk starts with the unused sentences. If both are too long, the
longer one loses a token at a time, at its start or its end with equal probability.

Every choice about a chunk is a hash of its first sentence. So the chunk that would start at each
sentence of a shard, and the sentence after it, are computed for all sentences at once, and reading
a document means following these links. For example, if the chunks at sentences 0 to 5 are followed
by 2, 2, 5, 4, 6 and 6, the chunks start at 0, 2 and 5. Only the place of a random B also depends on
the epoch, so a shard has the same chunks, and the same number of examples, in every epoch.

For sentence order (Lan et al. 2020, "ALBERT", section 3.1) B always is the rest of the chunk, and
with probability 1/2, by the epoch, both are swapped. A chunk of one sentence is split at a random
token; ALBERT's code takes a random B there, which could be told from its topic. A chunk of one
token has no order and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline.packing import Int64, PackPlan, ranges
from samestep.errors import ConfigError
from samestep.examples import PackSpec, PairTask
from samestep.hashing import U64, combine, mix, name_key, uniform

SHORT_FRACTION = 0.1  # of the documents have a shorter target length

_TARGET = name_key("pairs.target")
_CHUNK = name_key("pairs.chunk")
_SECOND = name_key("pairs.second")
_CUT = name_key("pairs.cut")
_SPLIT = name_key("pairs.split")
_SWAP = name_key("pairs.swap")
_WORD = 64  # random bits of a hash


def plan(
    lengths: npt.ArrayLike, sentences: Int64, spec: PackSpec, key: int = 0, epoch: int = 0
) -> PackPlan:
    """Packs the documents of a shard; each example has two segments.

    Args:
        lengths: int [D], tokens of each document.
        sentences: int [K], first token of each sentence, counted through all documents. Every
            document that is not empty starts a sentence.
        spec: length of examples, and number of special tokens.
        key: seed of all choices.
        epoch: changes where random segments come from.

    Returns:
        The plan, with `random` set. For next-sentence prediction it has no examples if fewer than
        two documents have tokens, since some segments have to come from another document.

    Raises:
        ConfigError: examples are too short for two segments.
    """
    room = _room(spec)
    text = _read(np.asarray(lengths, dtype=np.int64), sentences, room, key, spec.pairs)
    first, middle, end, random = _chunks(text, key, spec.pairs)
    start, stop = text.begin[first], text.end[end - 1]
    # Where B starts: at a sentence, unless the chunk has only one.
    second = text.begin[np.minimum(middle, len(text.begin) - 1)]
    if spec.pairs == "order":
        inside = start + 1 + _below(np.maximum(1, stop - start - 1), combine(key, _SPLIT, first))
        second = np.where(middle == end, inside, second)
        # By the epoch, unlike random seconds: the chunks, and their number, stay the same.
        random = uniform(combine(key, _SWAP, epoch, first)) < 0.5
        first_stop = second
    else:
        first_stop = text.end[middle - 1]
    begin = np.stack((start, second))
    length = np.stack((first_stop, stop)) - begin
    document = np.stack((text.document[first], text.document[first]))

    if spec.pairs == "order":
        # Swapped rows have the rest of the chunk as A: columns of [2, N] are reversed.
        begin[:, random], length[:, random] = begin[::-1, random], length[::-1, random]
    else:
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
    """Returns the number of examples of `plan`, which is the same in every epoch."""
    text = _read(np.asarray(lengths, dtype=np.int64), sentences, _room(spec), key, spec.pairs)
    return len(_chunks(text, key, spec.pairs)[0])


def _room(spec: PackSpec) -> int:
    room = spec.sequence_length - spec.prefix - 2 * spec.suffix
    if room < 2:
        least = spec.prefix + 2 * spec.suffix + 2
        raise ConfigError(
            f"data.sequence_length is {spec.sequence_length}, and data.packing pairs needs room "
            f"for two segments and {least - 2} special tokens; use at least {least}"
        )
    return room


@dataclass(frozen=True, eq=False)
class _Text:
    """The D documents of a shard that are not empty, and their K sentences.

    Tokens and sentences are counted through all documents.

    Attributes:
        number: int64 [D], the document's number in the shard.
        first_token: int64 [D].
        first_sentence: int64 [D + 1].
        target: int64 [D], target length of the document's examples, in tokens.
        document: int64 [K], the document of each sentence, from 0 to D - 1.
        begin, end: int64 [K], the sentence's tokens are [begin, end).
    """

    number: Int64
    first_token: Int64
    first_sentence: Int64
    target: Int64
    document: Int64
    begin: Int64
    end: Int64


def _read(lengths: Int64, sentences: Int64, room: int, key: int, task: PairTask | None) -> _Text:
    """Lists the documents and sentences of a shard; empty if too few documents have tokens."""
    number = np.flatnonzero(lengths)
    if len(number) < (1 if task == "order" else 2):
        number = number[:0]
        sentences = sentences[:0]
    end_token = np.cumsum(lengths)[number]
    first_token = end_token - lengths[number]
    first_sentence = np.append(np.searchsorted(sentences, first_token), len(sentences))
    random_bits = combine(key, _TARGET, number)
    shorter = 2 + _below(room - 1, mix(random_bits))
    return _Text(
        number=number,
        first_token=first_token,
        first_sentence=first_sentence,
        target=np.where(uniform(random_bits) < SHORT_FRACTION, shorter, room),
        document=np.repeat(np.arange(len(number)), np.diff(first_sentence)),
        begin=sentences,
        end=np.append(sentences[1:], end_token[-1:]),
    )


def _chunks(
    text: _Text, key: int, task: PairTask | None
) -> tuple[Int64, Int64, Int64, npt.NDArray[np.bool_]]:
    """Splits the documents into chunks.

    Returns:
        For each chunk: its first sentence, the first one after A, the first one after the chunk,
        and whether B is random.
    """
    sentence = np.arange(len(text.begin))
    end = _after(text, sentence, text.target[text.document])
    random_bits = combine(key, _CHUNK, sentence)
    middle = sentence + 1 + _below(np.maximum(1, end - sentence - 1), random_bits >> np.uint64(1))
    random = (random_bits & np.uint64(1)).astype(np.bool_) | (middle == end)
    if task == "order":
        random[:] = False

    # The last chunk of a document is followed by the first one of the next document.
    following = np.where(random, middle, end).tolist()
    first, at = [], 0
    while at < len(following):
        first.append(at)
        at = following[at]
    chunk = np.array(first, dtype=np.int64)
    if task == "order":
        # A chunk of one token cannot be split.
        chunk = chunk[text.end[end[chunk] - 1] - text.begin[chunk] > 1]
    return chunk, middle[chunk], end[chunk], random[chunk]


def _after(text: _Text, sentence: Int64, tokens: Int64) -> Int64:
    """The end of the sentences from `sentence` on that reach `tokens` or the document's end."""
    reached = np.searchsorted(text.end, text.begin[sentence] + tokens) + 1
    return np.minimum(reached, text.first_sentence[text.document[sentence] + 1])


def _random_seconds(
    text: _Text, first: Int64, first_length: Int64, key: U64
) -> tuple[Int64, Int64, Int64]:
    """Random segments B: from a random sentence of a random other document up to the target length.

    Args:
        text: documents and sentences of the shard.
        first: int64 [N], the first sentence of each A.
        first_length: int64 [N], tokens of each A.
        key: uint64 [1], differs between epochs.

    Returns:
        document, begin, length: int64 [N].
    """
    random_bits = combine(key, first)
    own = text.document[first]
    # One of the D - 1 other documents: numbers from `own` on move up by one.
    other = _below(max(1, len(text.number) - 1), random_bits)
    other += other >= own
    begin = text.first_sentence[other]
    begin = begin + _below(text.first_sentence[other + 1] - begin, mix(random_bits))
    end = _after(text, begin, np.maximum(1, text.target[own] - first_length))
    return other, text.begin[begin], text.end[end - 1] - text.begin[begin]


def _truncate(length: Int64, room: int, key: U64) -> tuple[Int64, Int64]:
    """Truncates the longer segment (B if both are equal), token by token, until both fit.

    Args:
        length: int64 [2, N], tokens of A and B.
        room: maximum number of tokens of both together.
        key: uint64 [2, N], seed of the choices between start and end.

    Returns:
        The number of tokens removed from the start, and of tokens left: int64 [2, N] each.
    """
    # If both are longer than half of the room, each gets half, and A the odd token. Otherwise the
    # shorter one stays whole: for 10 tokens, lengths (9, 8) become (5, 5), and (9, 3) become (7,
    # 3).
    share = np.array([[-(-room // 2)], [room // 2]])
    left = np.minimum(length, np.maximum(share, room - length[::-1]))
    return _heads((length - left).ravel(), key.ravel()).reshape(length.shape), left


def _heads(coins: Int64, key: U64) -> Int64:
    """The number of heads in `coins` tosses of a fair coin."""
    # Count the bits of hashes, 64 tosses in each, without the unused bits of the last one.
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
