"""Corruptions of texts, each a pure function of the tokens and keys of its texts.

A choice about a text is a hash of (its purpose, the text's key, the position), so it does not
depend on the batch that holds the text. Texts are `Ragged`: all tokens end to end, and the length
of each text. None has more than 65,536 tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from samestep.hashing import U64, combine, mix, name_key, uniform
from trainer.objectives.rows import Bools, Int32, Int64, fill_spans
from trainer.objectives.text_to_text import Ragged

_KEPT = name_key("span_corruption.kept")
_NOISE = name_key("span_corruption.noise")
_CHOOSE = name_key("noise.choose")
_REPLACE = name_key("noise.replace")
_SHUFFLE = name_key("noise.shuffle")
_ROTATE = name_key("noise.rotate")
_SENTENCES = name_key("noise.sentences")
_LENGTH = name_key("noise.infill.length")
_PLACE = name_key("noise.infill.place")
_POSITION_BITS = np.uint64(0xFFFF)
_HASH_BITS = np.uint64(0xFFFFFFFF00000000)


def noise_count(length: Int64, density: npt.ArrayLike) -> Int64:
    """Number of tokens to corrupt in texts of the given lengths; one token is always kept."""
    # For a text of one token the bounds contradict each other, and np.clip gives the upper one, 0.
    noise: Int64 = np.clip(np.rint(length * np.asarray(density)), 1, length - 1).astype(np.int64)
    return noise


def span_count(length: Int64, noise: Int64, mean: npt.ArrayLike) -> Int64:
    """Number of noise spans. Every span has a token, and follows a kept one."""
    wanted = np.rint(noise / np.asarray(mean))
    spans: Int64 = np.clip(wanted, np.minimum(noise, 1), length - noise).astype(np.int64)
    return spans


def choose(length: Int64, noise: Int64, key: U64) -> Bools:
    """Marks tokens of each text, bool [number of tokens]; each set of that size is equally likely.

    Args:
        length, noise: int64 [Q], number of tokens of each text, and of those to mark.
        key: uint64 [Q], of each text's choices.
    """
    chosen = np.zeros(length.sum(), dtype=np.bool_)
    chosen[_lowest(length, noise, combine(key, _CHOOSE))] = True
    return chosen


def replace(
    texts: Ragged,
    key: U64,
    chosen: Bools,
    mask: int,
    ordinary: Int32,
    replace_mask: float,
    replace_random: float,
) -> Ragged:
    """Replaces chosen tokens as BERT does (Devlin et al. 2019, section 3.1).

    Args:
        chosen: bool [number of tokens].
        mask: id of the token that most of them become.
        ordinary: ids of which random tokens are taken.
        replace_mask, replace_random: probabilities of `mask` and of a random token; other chosen
            tokens stay as they are.
    """
    (at,) = np.nonzero(chosen)
    text = np.repeat(np.arange(texts.length.size), texts.length)[at]
    start = np.cumsum(texts.length) - texts.length
    hashed = combine(key[text], _REPLACE, at - start[text])
    sample = uniform(hashed)
    is_mask = sample < replace_mask
    is_random = ~is_mask & (sample < replace_mask + replace_random)
    tokens = texts.tokens.copy()
    tokens[at[is_mask]] = mask
    # Hashed again: the hashes of random replacements all lie in one narrow range.
    tokens[at[is_random]] = ordinary[mix(hashed[is_random]) % np.uint64(ordinary.size)]
    return Ragged(tokens, texts.length)


def shuffle(texts: Ragged, key: U64) -> Ragged:
    """Puts the tokens of each text in random order."""
    return Ragged(texts.tokens[random_order(texts.length, combine(key, _SHUFFLE))], texts.length)


def rotate(texts: Ragged, key: U64) -> Ragged:
    """Begins each text with one of its tokens; those before it follow at the end."""
    start = np.cumsum(texts.length) - texts.length
    first = np.floor(uniform(combine(key, _ROTATE)) * texts.length).astype(np.int64)
    start, first, length = (np.repeat(each, texts.length) for each in (start, first, texts.length))
    position = np.arange(length.size) - start
    return Ragged(texts.tokens[start + (position + first) % length], texts.length)


def permute_sentences(texts: Ragged, key: U64, full_stops: tuple[int, ...]) -> Ragged:
    """Puts the sentences of each text in random order.

    A sentence ends with a full stop (the last of several), or with the text.
    """
    # Example: the text "a . b c . . d" has sentences of 2, 4 and 1 tokens.
    is_end = np.isin(texts.tokens, full_stops)
    is_end[:-1] &= ~is_end[1:]
    is_end[np.cumsum(texts.length) - 1] = True
    (end,) = np.nonzero(is_end)
    text = np.repeat(np.arange(texts.length.size), texts.length)[end]
    sentences = Ragged(texts.tokens, np.diff(end, prepend=-1))
    count = np.bincount(text, minlength=texts.length.size)
    order = random_order(count, combine(key, _SENTENCES))
    return Ragged(_take(sentences, order), texts.length)


def infill(texts: Ragged, key: U64, noise: Int64, mean: float, mask: int) -> Ragged:
    """Replaces each of several spans by one mask (Lewis et al. 2020, "BART", section 2.2).

    The spans' lengths have a Poisson distribution, until all of `noise` tokens are in
    spans; the last one gets what is left. A span of length 0 inserts a mask. The masks are in
    random positions among the kept tokens, and each arrangement is equally likely. As in fairseq, a
    text gets at most as many spans as masked tokens.

    Args:
        noise: int64 [Q], number of tokens to mask in each text.
        mean: mean of the distribution.
        mask: id of the token that replaces spans.
    """
    # Example: 4 of the tokens a b c d e f are masked, and the random lengths are 3 0 2 ...: the
    # spans have 3, 0 and 1 tokens. The arrangement "M x M M x" of masks M and kept tokens x gives
    # the spans "a b c", nothing and "e", so the source is "M d M M f".
    text = np.repeat(np.arange(noise.size), noise)
    first = np.cumsum(noise) - noise
    number = np.arange(text.size) - first[text]
    sampled = _poisson(combine(key[text], _LENGTH, number), mean)
    masked = np.cumsum(sampled) - sampled  # by earlier spans of all texts
    left = noise[text] - (masked - masked[first[text]])
    sampled = np.where(number == noise[text] - 1, left, np.minimum(sampled, left))
    is_used = left > 0
    spans = np.bincount(text[is_used], minlength=noise.size)
    span_length = sampled[is_used]

    length = texts.length - noise + spans
    is_mask = np.zeros(length.sum(), dtype=np.bool_)
    is_mask[_lowest(length, spans, combine(key, _PLACE))] = True
    # Kept tokens before a mask, and masked ones, through all texts: where its span begins.
    kept_before = np.flatnonzero(is_mask) - np.arange(span_length.size)
    begin = kept_before + np.cumsum(span_length) - span_length
    is_noise = fill_spans(begin, begin + span_length, np.True_, texts.tokens.size)
    tokens = np.full(is_mask.size, mask, dtype=np.int32)
    tokens[~is_mask] = texts.tokens[~is_noise]
    return Ragged(tokens, length)


def _poisson(key: U64, mean: float) -> Int64:
    """Poisson-distributed numbers, by the inverse of the distribution function."""
    # No uniform number of 53 bits exceeds the sum of this many probabilities by more than rounding.
    numbers = np.arange(1, int(mean + 12 * mean**0.5 + 30))
    logs = np.concatenate(([0.0], np.cumsum(np.log(mean / numbers)))) - mean
    found: Int64 = np.searchsorted(np.cumsum(np.exp(logs))[:-1], uniform(key), side="right")
    return found


def random_spans(length: Int64, noise: Int64, spans: Int64, key: U64) -> tuple[Int64, Int64]:
    """Places spans as `random_spans_noise_mask` of google-research's T5 does.

    Each way to cut the corrupted tokens, and the others, into that many parts is equally likely. A
    text begins with a kept token and ends with a corrupted one; a text of one token has no spans.

    Args:
        length, noise, spans: int64 [Q], number of tokens, corrupted tokens and spans of each text.
        key: uint64 [Q], of each text's choices.

    Returns:
        int64 [number of spans], the first token of each span, counted through all texts, and its
        number of tokens.
    """
    # Example: the text a b c d e with kept parts of 1 and 1 tokens and corrupted ones of 1 and 2 is
    # a (b) c (d e).
    #
    #     kept before        1 2     kept tokens up to each span
    #     corrupted before   0 1     corrupted tokens before it
    #     begin              1 3     their sum: where the span begins in the text
    has_spans = spans > 0  # texts of more than one token
    # The kept tokens of all texts, then the corrupted ones of all texts, in one call.
    items = np.concatenate(((length - noise)[has_spans], noise[has_spans]))
    keys = np.concatenate((combine(key[has_spans], _KEPT), combine(key[has_spans], _NOISE)))
    kept, corrupted = np.split(random_parts(items, np.tile(spans[has_spans], 2), keys), 2)
    # Texts of one token have no part in `kept`; each one before adds its token.
    text = np.repeat(np.arange(spans.size), spans)
    kept_before = np.cumsum(kept) + np.cumsum(~has_spans)[text]
    return kept_before + np.cumsum(corrupted) - corrupted, corrupted


def runs(chosen: Bools, length: Int64) -> tuple[Int64, Int64, Int64]:
    """The runs of chosen tokens that follow each other in a text.

    Args:
        chosen: bool [number of tokens].
        length: int64 [Q], number of tokens of each text.

    Returns:
        int64 [Q], number of runs of each text; int64 [number of runs], the first token of each,
        counted through all texts, and its number of tokens.
    """
    # A run begins at a chosen token after one that is not, or at the beginning of a text.
    is_first = chosen.copy()
    is_first[1:] &= ~chosen[:-1]
    start = np.cumsum(length) - length
    is_first[start] = chosen[start]
    (begin,) = np.nonzero(is_first)
    # The number of chosen tokens before each run, and at the end of all.
    before: Int64 = (np.cumsum(chosen) - chosen)[begin]
    text = np.repeat(np.arange(length.size), length)[begin]
    count = np.bincount(text, minlength=length.size)
    return count, begin, np.diff(before, append=np.count_nonzero(chosen))


def random_order(items: Int64, key: U64) -> Int64:
    """Shuffles the items of each row; each order is equally likely.

    Args:
        items: int64 [G], number of items of each row; at most 65,536.
        key: uint64 [G], of each row's choices.

    Returns:
        int64 [sum of items], of each row its items, counted through all rows.
    """
    return _lowest(items, items, key)


def random_parts(items: Int64, parts: Int64, key: U64) -> Int64:
    """Cuts rows of items into parts of at least one item; each way to do so is equally likely.

    A row's first part begins with its first item, and the others with the items of lowest hash.

    Args:
        items: int64 [G], number of items of each row; at most 65,536.
        parts: int64 [G], number of parts of each row; at least 1, at most its items.
        key: uint64 [G], of each row's choices.

    Returns:
        int64 [sum of parts], the number of items of each part.
    """
    # Example: 5 items in 3 parts with the hashes 7 4 9 1 6. Parts begin with the items 0, 3 (hash
    # 1) and 1 (hash 4), so they have 1, 2 and 2 items.
    begin = _lowest(items, parts, key, first_is_lowest=True)
    begin.sort()
    lengths: Int64 = np.diff(begin, append=items.sum())
    return lengths


def _lowest(items: Int64, count: Int64, key: U64, *, first_is_lowest: bool = False) -> Int64:
    """The items of lowest hash of each row, in the order of rows, then of hashes.

    Args:
        items: int64 [G], number of items of each row; at most 65,536.
        count: int64 [G], number of items to return of each row.
        key: uint64 [G], of each row's hashes.
        first_is_lowest: whether each row's first item comes first; all rows must have items then.

    Returns:
        int64 [sum of count], items counted through all rows.
    """
    # All rows are sorted at once. The bits of a rank, from high to low: the row, which keeps rows
    # apart; bits of the hash; and the item's position in its row, 16 bits, which makes ranks
    # distinct and is read back after sorting.
    row_bits = items.size.bit_length()
    start = np.cumsum(items) - items
    position = np.arange(items.sum(), dtype=np.uint64) - np.repeat(start.astype(np.uint64), items)
    rank = mix(np.repeat(key, items) ^ position)
    if not first_is_lowest:
        # An order has many pairs of neighbors. Two that tie must do so however many rows there are,
        # so the bits that the row's number may take are cleared in every batch.
        rank &= _HASH_BITS
    rank >>= np.uint64(row_bits)
    rank &= ~_POSITION_BITS
    rank |= position
    if first_is_lowest:
        rank[start] = 0
    row = np.arange(items.size, dtype=np.uint64)
    rank |= np.repeat(row << np.uint64(64 - row_bits), items)
    rank.sort()
    # The first count[g] ranks of each row g, which begin at start[g].
    first = np.cumsum(count) - count
    lowest = np.repeat(start - first, count) + np.arange(count.sum())
    found: Int64 = (rank[lowest] & _POSITION_BITS).astype(np.int64) + np.repeat(start, count)
    return found


def _take(sequences: Ragged, index: Int64) -> Int32:
    """The tokens of sequences by number: int32 [number of tokens]."""
    # A token at `place` of the result is at `place + shift` among the given ones.
    length = sequences.length[index]
    start = np.cumsum(sequences.length) - sequences.length
    shift = start[index] - (np.cumsum(length) - length)
    taken: Int32 = sequences.tokens[np.arange(length.sum()) + np.repeat(shift, length)]
    return taken
