"""Whole-word masking takes words in random order while they fit, as google-research/bert."""

import time

import numpy as np
import pytest

from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from samestep.hashing import combine, mix, name_key
from trainer.objectives.kinds import mlm
from trainer.objectives.rows import columns_of
from trainer.objectives.whole_words import choose_words

PAD, CLS, SEP, MASK = 0, 1, 2, 3
CONTINUING = tuple(range(500, 990))
VOCABULARY = Vocabulary(1000, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK, 999), CONTINUING)


def random_rows(rows: int, width: int, going_on: float = 0.4, seed: int = 0) -> np.ndarray:
    """Tokens [B, S], one sequence a row, with a separator and a special token inside."""
    random = np.random.default_rng(seed)
    continuing = random.random((rows, width)) < going_on
    tokens = np.where(
        continuing, random.integers(500, 990, (rows, width)), random.integers(4, 500, (rows, width))
    )
    tokens[np.arange(rows), random.integers(1, width - 1, rows)] = SEP
    tokens[np.arange(rows), random.integers(1, width - 1, rows)] = 999
    tokens[:, 0] = CLS
    tokens[np.arange(width) > random.integers(3, width, rows)[:, None]] = PAD
    return tokens


def words_of(row: list[int]) -> list[list[int]]:
    """The columns of each word: a continuing token extends the word before it."""
    words: list[list[int]] = []
    for column, token in enumerate(row):
        if token in VOCABULARY.special:
            continue
        if token in CONTINUING and column and row[column - 1] not in VOCABULARY.special:
            words[-1].append(column)
        else:
            words.append([column])
    return words


def choose_one_by_one(words: list[list[int]], budget: int, key: int) -> list[int]:
    """google-research/bert's loop over the shuffled words of a row."""
    sampled = [
        int(combine(key, name_key("mlm.word"), word[0])[0]) & ~0xFFFF | word[0] for word in words
    ]
    chosen: list[int] = []
    for _, word in sorted(zip(sampled, words, strict=True)):
        if len(chosen) >= budget:
            break
        if len(chosen) + len(word) <= budget:
            chosen += word
    return sorted(chosen)


@pytest.mark.parametrize("width", [4, 24, 128])
@pytest.mark.parametrize("going_on", [0.0, 0.4, 0.9])
def test_words_are_those_of_berts_loop(width: int, going_on: float) -> None:
    tokens = random_rows(60, width, going_on)
    key = mix(np.arange(60))
    maskable = ~np.isin(tokens, VOCABULARY.special)
    for share in (0.15, 0.5, 1.0):
        budget = np.maximum(1, np.rint(share * maskable.sum(axis=1))).astype(np.int64)
        chosen = choose_words(key, maskable, np.isin(tokens, CONTINUING), budget)
        columns, used = columns_of(chosen, width)
        for row in range(60):
            expected = choose_one_by_one(
                words_of(tokens[row].tolist()), int(budget[row]), int(key[row])
            )
            assert columns[row][used[row]].tolist() == expected
        assert not columns[~used].any()


def test_nothing_to_choose() -> None:
    nothing = np.zeros((3, 8), dtype=bool)
    assert not choose_words(mix([1, 2, 3]), nothing, nothing, np.ones(3, dtype=np.int64)).any()


def examples_of(tokens: np.ndarray) -> Examples:
    rows, length = tokens.shape
    ones = np.ones(rows, dtype=np.int64)
    row = np.arange(rows)
    return Examples(
        tokens.ravel().astype(np.int32),
        row,
        ones,
        length * ones,
        mix(row),
        ones.astype(np.float32),
        isolated=False,
    )


def test_the_objective_masks_words_whole_and_within_its_share() -> None:
    random = np.random.default_rng(0)
    text = np.where(
        random.random((300, 126)) < 0.4,
        random.integers(500, 990),
        random.integers(4, 500, (300, 126)),
    )
    objective = mlm.Config(whole_words=True).build(VOCABULARY)
    batch = objective.collate(examples_of(text), 128)
    used = batch["weights"] > 0
    assert used.shape == (300, 19)
    count = used.sum(axis=1)
    assert count.max() == 19
    assert (
        count.mean() > 18.9
    )  # words too long for the rest of the share are passed over for shorter ones
    for row in range(300):
        chosen = set(batch["predicted"][row][used[row]].tolist())
        for word in words_of([CLS, *text[row].tolist(), SEP]):
            assert chosen.issuperset(word) or chosen.isdisjoint(word)
    original = batch["tokens"].copy()
    np.put_along_axis(original, batch["predicted"], batch["labels"].astype(np.int32), axis=1)
    assert (original[:, 1:127] == text).all()


def test_without_whole_words_nothing_has_changed() -> None:
    """The masks of the vocabulary with word boundaries are those of one without."""
    text = np.random.default_rng(0).integers(4, 990, (50, 62))
    plain = mlm.Config().build(Vocabulary(1000, PAD, CLS, SEP, MASK, VOCABULARY.special))
    for name, array in plain.collate(examples_of(text), 64).items():
        np.testing.assert_array_equal(
            array, mlm.Config().build(VOCABULARY).collate(examples_of(text), 64)[name]
        )


def test_masks_are_the_same_for_ever() -> None:
    text = np.where(np.arange(62) % 3 == 1, 700, np.arange(62) + 10)[None]
    batch = mlm.Config(whole_words=True).build(VOCABULARY).collate(examples_of(text), 64)
    assert batch["predicted"].tolist() == [[10, 11, 13, 14, 40, 41, 54, 61, 62]]


def test_a_tokenizer_without_word_boundaries_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="whole_words is true, and this tokenizer does not say where words begin"
    ):
        mlm.Config(whole_words=True).build(
            Vocabulary(1000, PAD, CLS, SEP, MASK, VOCABULARY.special)
        )


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("wordpiece", ["unbelievable", "foxes", ",", "run"]),
        ("bpe", ["unbelievable", " foxes,", " run"]),
    ],
)
def test_tokenizers_say_where_words_begin(algorithm: str, words: list[str]) -> None:
    tokenizer = TokenizerConfig("unused", algorithm, vocab_size=300).train(
        ["the foxes run, unbelievable"] * 3
    )
    assert tokenizer.vocabulary.continuing is not None
    (tokens,) = tokenizer.encode_batch(["unbelievable foxes, run"])
    begins = np.flatnonzero(~np.isin(tokens, tokenizer.vocabulary.continuing))
    if algorithm == "bpe":  # the first word of a text has no space before it
        begins = np.union1d([0], begins)
    found = [tokenizer.decode(word).replace("##", "") for word in np.split(tokens, begins[1:])]
    assert [word.replace(" ", "") for word in found] == [word.replace(" ", "") for word in words]


def test_speed() -> None:
    tokens = random_rows(64, 128)
    maskable, continuing = ~np.isin(tokens, VOCABULARY.special), np.isin(tokens, CONTINUING)
    budget = np.full(64, 19)
    begin = time.process_time()
    for i in range(50):
        choose_words(mix(np.arange(64) + i), maskable, continuing, budget)
    assert (
        time.process_time() - begin < 0.5
    )  # measured: 0.03 s; a Python loop over rows takes seconds
