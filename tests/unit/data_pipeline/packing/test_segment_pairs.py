"""Pairs of segments are those of BERT's own data preparation, written down here step by step."""

import functools
import itertools
import time

import numpy as np
import pytest

from data_pipeline.packing import PackPlan, ranges
from data_pipeline.packing.policy import packing_digest
from data_pipeline.packing.segment_pairs import count_examples, plan
from samestep.errors import ConfigError
from samestep.examples import PackSpec
from samestep.hashing import combine, mix, name_key, uniform

SPEC = PackSpec(32, 1, 1)


def make_shard(
    documents: int, sentences: int, longest: int = 20, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of documents, and where their sentences begin.

    A document has 1 to `sentences` of them.
    """
    random = np.random.default_rng(seed)
    count = random.integers(1, sentences + 1, documents)
    size = random.integers(1, longest + 1, count.sum())
    return np.add.reduceat(size, np.cumsum(count) - count), np.cumsum(size) - size


class Choices:
    """The random choices of one shard and epoch, named after what they decide."""

    def __init__(self, key: int, epoch: int) -> None:
        self.key, self.epoch = key, epoch

    def target(self, document: int, room: int) -> int:
        draw = combine(self.key, name_key("pairs.target"), document)
        return int(2 + int(mix(draw)[0]) % (room - 1)) if uniform(draw)[0] < 0.1 else room

    def chunk(self, first: int) -> int:
        return int(combine(self.key, name_key("pairs.chunk"), first)[0])

    def second(self, first: int) -> np.ndarray:
        return combine(combine(self.key, name_key("pairs.second"), self.epoch), first)

    def front(self, first: int, segment: int, coin: int) -> bool:
        return bool(coins(self.key, first, segment, coin // 64) >> 63 - coin % 64 & 1)


@functools.cache
def coins(key: int, first: int, segment: int, word: int) -> int:
    """64 coins, the first one in the highest bit."""
    return int(combine(combine(key, name_key("pairs.cut"), segment, first), word)[0])


def bert_pairs(
    documents: list[list[list[int]]], room: int, choices: Choices
) -> list[tuple[list[int], list[int], bool]]:
    """Segments A and B of each example, as lists of tokens, and whether B is random."""
    sentence_number = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    examples = []
    for d, document in enumerate(documents):
        target = choices.target(d, room)
        i, chunk = 0, list[list[int]]()
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(map(len, chunk)) >= target:
                first = sentence_number[d] + i + 1 - len(chunk)
                draw = choices.chunk(first)
                a_end = 1 + (draw >> 1) % (len(chunk) - 1) if len(chunk) > 1 else 1
                a = [token for sentence in chunk[:a_end] for token in sentence]
                random = len(chunk) == 1 or draw % 2 == 1
                if random:
                    wanted, draws = target - len(a), choices.second(first)
                    other = int(draws[0]) % (len(documents) - 1)
                    other += other >= d
                    b: list[int] = []
                    for sentence in documents[other][int(mix(draws)[0]) % len(documents[other]) :]:
                        b.extend(sentence)
                        if len(b) >= wanted:
                            break
                    i -= len(chunk) - a_end
                else:
                    b = [token for sentence in chunk[a_end:] for token in sentence]
                tossed = [0, 0]
                while len(a) + len(b) > room:
                    segment, longer = (0, a) if len(a) > len(b) else (1, b)
                    longer.pop(0 if choices.front(first, segment, tossed[segment]) else -1)
                    tossed[segment] += 1
                examples.append((a, b, random))
                chunk = []
            i += 1
    return examples


def segments(packed: PackPlan, lengths: np.ndarray) -> list[tuple[list[int], list[int], bool]]:
    """A plan in the terms of `bert_pairs`; tokens are numbered through the shard."""
    begin = (np.cumsum(lengths) - lengths)[packed.document] + packed.begin
    runs = [
        list(range(b, b + n)) for b, n in zip(begin.tolist(), packed.length.tolist(), strict=True)
    ]
    return list(zip(runs[::2], runs[1::2], packed.random.tolist(), strict=True))


@pytest.mark.parametrize(
    ("documents", "sentences", "longest", "width"),
    [
        (40, 30, 20, 64),
        (20, 20, 20, 16),
        (200, 3, 10, 32),
        (2, 200, 30, 128),
        (10, 4, 300, 32),
        (30, 20, 2, 5),
    ],
)
def test_pairs_are_those_of_berts_own_algorithm(
    documents: int, sentences: int, longest: int, width: int
) -> None:
    for seed in range(3):
        lengths, starts = make_shard(documents, sentences, longest, seed)
        tokens = np.split(np.arange(lengths.sum()), starts[1:])
        first_token = np.cumsum(lengths) - lengths
        bounds = [*np.searchsorted(starts, first_token), len(starts)]
        texts = [[s.tolist() for s in tokens[a:b]] for a, b in itertools.pairwise(bounds)]
        packed = plan(lengths, starts, PackSpec(width, 1, 1), key=seed + 7, epoch=seed)
        assert segments(packed, lengths) == bert_pairs(texts, width - 3, Choices(seed + 7, seed))
        assert packed.examples == count_examples(
            lengths, starts, PackSpec(width, 1, 1), key=seed + 7
        )


def test_rows_have_room_for_their_special_tokens() -> None:
    lengths, starts = make_shard(500, 20)
    packed = plan(lengths, starts, SPEC)
    assert packed.example_start.tolist() == list(range(0, 2 * packed.examples + 1, 2))
    assert (packed.column[::2] == 1).all()
    assert (packed.column[1::2] == packed.length[::2] + 2).all()  # [CLS] A [SEP]
    assert (packed.column[1::2] + packed.length[1::2] + 1 <= 32).all()
    assert (packed.length >= 1).all()
    assert (packed.begin >= 0).all()
    assert (packed.begin + packed.length <= lengths[packed.document]).all()


def test_half_of_the_seconds_are_random_and_from_other_documents() -> None:
    lengths, starts = make_shard(3000, 60, longest=8)
    packed = plan(lengths, starts, PackSpec(128, 1, 1))
    same = packed.document[::2] == packed.document[1::2]
    assert (same == ~packed.random).all()
    following = packed.begin[1::2] >= packed.begin[::2] + packed.length[::2]
    assert following[~packed.random].all()
    # A document's last sentence alone has no next one, which adds to the half.
    alone = packed.begin[::2] + packed.length[::2] == lengths[packed.document[::2]]
    assert packed.random[~alone].mean() == pytest.approx(0.5, abs=0.02)
    chosen = np.bincount(packed.document[1::2][packed.random], minlength=3000)
    assert chosen.var() == pytest.approx(
        chosen.mean(), rel=0.15
    )  # every document as often as any other: Poisson


def test_a_tenth_of_the_documents_makes_short_examples() -> None:
    lengths, starts = make_shard(3000, 60, longest=8)
    packed = plan(lengths, starts, PackSpec(128, 1, 1))
    positions = packed.length[::2] + packed.length[1::2]
    longest = np.zeros(3000, dtype=np.int64)
    np.maximum.at(longest, packed.document[::2], positions)
    long_enough = lengths > 250  # each of them has a full example otherwise
    assert (longest[long_enough] < 125).mean() == pytest.approx(0.1, abs=0.03)


def test_tokens_are_lost_to_truncation_only() -> None:
    lengths, starts = make_shard(300, 30, longest=8)
    packed = plan(lengths, starts, PackSpec(512, 1, 1))  # longer than any two documents
    first_token = np.cumsum(lengths) - lengths
    own = np.ones(2 * packed.examples, dtype=bool)
    own[1::2] = ~packed.random
    seen = np.zeros(lengths.sum(), dtype=int)
    np.add.at(
        seen, ranges(first_token[packed.document[own]] + packed.begin[own], packed.length[own]), 1
    )
    assert (seen == 1).all()


def test_an_epoch_changes_random_seconds_and_nothing_else() -> None:
    lengths, starts = make_shard(500, 20)
    first, again, later = (
        plan(lengths, starts, PackSpec(64, 1, 1), 3, epoch) for epoch in (0, 0, 1)
    )
    assert segments(first, lengths) == segments(again, lengths)
    assert (first.random == later.random).all()
    assert (first.document[::2] == later.document[::2]).all()
    kept = np.repeat(~first.random, 2)
    for name in ("document", "begin", "length", "column"):
        assert (getattr(first, name)[kept] == getattr(later, name)[kept]).all(), name
    moved = first.document[1::2][first.random] != later.document[1::2][first.random]
    assert moved.mean() > 0.95


def test_the_key_changes_everything() -> None:
    lengths, starts = make_shard(500, 20)
    first, other = (plan(lengths, starts, SPEC, key) for key in (1, 2))
    assert first.examples != other.examples
    assert (first.random[:100] == other.random[:100]).mean() < 0.8


@pytest.mark.parametrize("lengths", [[], [0, 0], [9], [0, 9, 0]], ids=str)
def test_fewer_than_two_documents_make_no_pairs(lengths: list[int]) -> None:
    packed = plan(lengths, np.array([0, 4] if sum(lengths) else [], dtype=np.int64), SPEC)
    assert packed.examples == len(packed.document) == len(packed.random) == 0


def test_empty_documents_take_no_part() -> None:
    lengths, starts = make_shard(50, 9)
    gaps = np.sort(np.random.default_rng(0).integers(0, 50, 30))
    packed, without = plan(np.insert(lengths, gaps, 0), starts, SPEC), plan(lengths, starts, SPEC)
    assert (np.insert(lengths, gaps, 0)[packed.document] > 0).all()
    assert packed.examples == pytest.approx(
        without.examples, rel=0.3
    )  # documents are keyed by their numbers


def test_sentences_longer_than_the_room_are_cut_to_halves() -> None:
    packed = plan([1000, 1000], np.array([0, 1000]), SPEC)
    assert packed.length.tolist() == [15, 14] * 2
    assert packed.random.all()
    assert (packed.begin > 300).all()  # about as much is cut from the front as from the back
    assert (packed.begin < 700).all()


def test_no_room_for_two_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sequence_length is 4, .* use at least 5"):
        plan([5, 5], np.array([0, 5]), PackSpec(4, 1, 1))


ORDER = PackSpec(64, 1, 1, pairs="order")


def test_segments_in_order_or_swapped_follow_each_other() -> None:
    lengths, starts = make_shard(400, 20, longest=8)
    packed = plan(lengths, starts, PackSpec(512, 1, 1, pairs="order"), key=3)
    pairs = segments(packed, lengths)
    for a, b, swapped in pairs:
        first, second = (b, a) if swapped else (a, b)
        assert first[-1] + 1 == second[0]
    assert np.mean([swapped for _, _, swapped in pairs]) == pytest.approx(0.5, abs=0.1)
    # Nothing is cut or lost, except documents of one token.
    seen = sorted(token for a, b, _ in pairs for token in a + b)
    short = (np.cumsum(lengths) - lengths)[lengths == 1].tolist()
    assert sorted([*seen, *short]) == list(range(lengths.sum()))


def test_an_epoch_swaps_other_segments() -> None:
    lengths, starts = make_shard(300, 20)
    first, again, later = (plan(lengths, starts, ORDER, 3, epoch) for epoch in (0, 0, 1))
    assert segments(first, lengths) == segments(again, lengths)
    assert first.examples == later.examples == count_examples(lengths, starts, ORDER, key=3)
    assert (first.random == later.random).mean() == pytest.approx(0.5, abs=0.1)
    same = first.random == later.random
    assert (first.begin.reshape(-1, 2)[same] == later.begin.reshape(-1, 2)[same]).all()


def test_one_sentence_is_split_and_one_document_is_enough() -> None:
    packed = plan([40], np.array([0]), ORDER)
    assert packed.examples == count_examples([40], np.array([0]), ORDER) == 1
    assert packed.length.sum() == 40
    assert (packed.length > 0).all()
    # [0, 1): a document of one token; [1, 6): a chunk that ends with a sentence of one token.
    packed = plan([1, 5], np.array([0, 1, 5]), ORDER)
    assert packed.document.tolist() == [1, 1]


def test_tasks_have_orders_of_their_own() -> None:
    digests = {
        packing_digest(PackSpec(64, 1, 1, pairs=task), "pairs") for task in ("next", "order")
    }
    assert len(digests) == 2


def test_golden_pairs() -> None:
    """If this fails, runs see other pairs than before.

    Raise PACKING_VERSION, and note it in CHANGELOG.md.
    """
    packed = plan(*make_shard(3, 5), SPEC, key=5, epoch=1)
    assert packed.document.tolist() == [0, 1, 0, 1, 1, 2, 1, 1, 1, 0, 2, 2]
    assert packed.begin.tolist() == [0, 39, 16, 3, 0, 24, 4, 21, 34, 16, 0, 15]
    assert packed.length.tolist() == [15, 14, 1, 28, 4, 20, 16, 13, 19, 1, 11, 18]


@pytest.mark.parametrize(
    ("documents", "sentences"), [(15_000, 20), (8, 30_000)], ids=["web", "books"]
)
def test_speed(documents: int, sentences: int) -> None:
    lengths, starts = make_shard(documents, sentences, longest=50)
    begin = time.process_time()
    plan(lengths, starts, PackSpec(128, 1, 1))
    assert (
        time.process_time() - begin < 2
    )  # measured: 0.1 s for 3M tokens, be it many documents or few long ones
