"""The text of a dataset as word numbers, against plain Python."""

from __future__ import annotations

import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.reading.dataset import Dataset
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import ConfigError, DataError
from tests.unit.vectors.corpora import Algorithm, write_dataset
from trainer.vectors import corpus
from trainer.vectors.corpus import WORD, Splitter, Words, count_words, words_in, write_numbers
from trainer.vectors.settings import Units

TEXTS = [
    "The cat sat on the mat. The cat's mat, un-wanted, is unaffable!",
    "",
    "A dog (the cat's friend) ran; it ran and ran.\n\nRunning dogs run on mats",
    "...",
    "unwanted",
    "the mat the cat the dog",
] * 3


def read(folder: Path, units: Units, min_count: int = 1, workers: int = 2) -> tuple[Words, list]:
    """The words of a dataset, and the names of each document's words."""
    dataset = Dataset.open(folder)
    splitter = Splitter(dataset.tokenizer, units)
    words, encoding = count_words(dataset, splitter, units, min_count, workers)
    path = folder / "text"
    write_numbers(dataset, splitter, encoding, path, workers)
    documents: list[list[str]] = [[]]
    for number in np.fromfile(path, "<i4").tolist():
        if number == corpus.END:
            documents.append([])
        else:
            documents[-1].append(words.names[number])
    assert documents.pop() == []
    return words, documents


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_words_are_those_of_the_text(tmp_path: Path, algorithm: Algorithm) -> None:
    folder = write_dataset(
        tmp_path / "data", TEXTS, 2, algorithm, 300 if algorithm == "bpe" else 40
    )
    words, documents = read(folder, "words")
    expected = [WORD.findall(text.lower()) for text in TEXTS]
    assert documents == [each for each in expected if each]
    counts = Counter(word for each in expected for word in each)
    assert words.names == sorted(counts, key=lambda word: (-counts[word], word))
    words.save(tmp_path / "vocabulary")
    loaded = Words.load(tmp_path / "vocabulary")
    assert (loaded.names, loaded.tokens) == (words.names, None)
    assert np.array_equal(loaded.counts, words.counts)
    assert dict(zip(words.names, words.counts.tolist(), strict=True)) == counts
    assert "cat's" in words.names


HINDI, TAMIL, ARABIC = "हिन्दी भाषा सुन्दर है", "தமிழ் மொழி", "مُحَمَّد كِتَاب"
DECOMPOSED = unicodedata.normalize("NFD", "müller café noël")


@pytest.mark.parametrize("text", [HINDI, TAMIL, ARABIC, DECOMPOSED])
@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])
def test_marks_belong_to_the_letter_before_them(
    tmp_path: Path, algorithm: Algorithm, text: str
) -> None:
    tokenizer = Config("", algorithm, 400).train([text] * 3)
    folder = write_dataset(tmp_path / "data", [f"{text}, ({text})"], 1, tokenizer=tokenizer)
    _, documents = read(folder, "words")
    assert documents == [text.split() * 2]


def test_a_mark_behind_no_letter_is_no_word() -> None:
    assert WORD.findall("a \u2764\ufe0f b \u0301 don\u2019t") == ["a", "b", "don\u2019t"]


def test_words_of_the_same_tokens_in_another_order_are_others(tmp_path: Path) -> None:
    texts = [" listen silent enlist"] * 3
    folder = write_dataset(tmp_path / "data", texts, 1, "bpe", 261)  # a token for each byte
    words, documents = read(folder, "words")
    assert documents == [texts[0].split()] * 3
    assert words.counts.tolist() == [3, 3, 3]


def test_words_of_wordpiece_end_at_punctuation(tmp_path: Path) -> None:
    _, documents = read(write_dataset(tmp_path / "data", TEXTS), "words")
    assert documents[0] == WORD.findall(
        "the cat sat on the mat the cat s mat un wanted is unaffable"
    )


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_words_of_a_short_text(tmp_path: Path, algorithm: Algorithm) -> None:
    vocabulary = 300 if algorithm == "bpe" else 40 if algorithm == "unigram" else 400
    folder = write_dataset(tmp_path / "data", TEXTS, 2, algorithm, vocabulary)
    _, documents = read(folder, "words")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    assert [each for text in TEXTS if (each := words_in(text, tokenizer))] == documents


def test_a_word_that_the_tokenizer_does_not_know_is_left_out(tmp_path: Path) -> None:
    texts = ["the cat \u4e2d the cat"] * 3
    tokenizer = Tokenizer.load(write_dataset(tmp_path / "a", ["the cat"], 1) / "tokenizer")
    folder = write_dataset(tmp_path / "b", texts, tokenizer=tokenizer)
    assert tokenizer.vocabulary.special
    _, documents = read(folder, "words")
    assert documents == [["the", "cat", "the", "cat"]] * 3


def test_a_short_text_with_an_unknown_character_inside_of_a_word(tmp_path: Path) -> None:
    """The unknown token ends the word, and the rest is another one, as in a dataset."""
    write_dataset(tmp_path / "a", TEXTS, 1, "unigram", 40)
    tokenizer = Tokenizer.load(tmp_path / "a" / "tokenizer")
    text = "the c\u4e2dat sat"
    folder = write_dataset(tmp_path / "b", [text] * 3, tokenizer=tokenizer)
    _, documents = read(folder, "words")
    assert "at" in documents[0]
    assert words_in(text, tokenizer) == documents[0]


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_tokens(tmp_path: Path, algorithm: Algorithm) -> None:
    folder = write_dataset(
        tmp_path / "data", TEXTS, 2, algorithm, 300 if algorithm == "bpe" else 40
    )
    tokenizer = Tokenizer.load(folder / "tokenizer")
    words, documents = read(folder, "tokens")
    encoded = [tokens.tolist() for tokens in tokenizer.encode_batch(TEXTS)]
    special = set(tokenizer.vocabulary.special)
    expected = [[tokenizer.token(t) for t in each if t not in special] for each in encoded]
    assert documents == [each for each in expected if each]
    assert words.tokens is not None
    assert [tokenizer.token(token) for token in words.tokens.tolist()] == words.names


def test_rare_words_leave_no_gap(tmp_path: Path) -> None:
    words, documents = read(write_dataset(tmp_path / "data", TEXTS), "words", min_count=9)
    counts = Counter(
        word for text in TEXTS for word in WORD.findall(text.lower().replace("'", " "))
    )
    assert set(words.names) == {word for word, count in counts.items() if count >= 9}
    assert documents[0] == WORD.findall("the cat the mat the cat mat")


def test_nothing_depends_on_blocks_and_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dataset(tmp_path / "data", TEXTS, 3)
    words, documents = read(folder, "words", 2)
    bytes_ = (folder / "text").read_bytes()
    for size, workers in ((1, 1), (16, 3), (40, 7)):
        monkeypatch.setattr(corpus, "_BLOCK_TOKENS", size)
        again, same = read(folder, "words", 2, workers)
        assert again.names == words.names
        assert np.array_equal(again.counts, words.counts)
        assert same == documents
        assert (folder / "text").read_bytes() == bytes_


def test_what_cannot_be_counted(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", TEXTS)
    with pytest.raises(DataError, match=r"is there 1000 times \(the most frequent word has 21\)"):
        read(folder, "words", 1000)
    with pytest.raises(DataError, match="it has no words"):
        read(write_dataset(tmp_path / "dots", ["...", "?"] * 9), "words")
    with pytest.raises(DataError, match=r"the train split of .* is empty"):
        read(
            write_dataset(tmp_path / "none", [], tokenizer=Dataset.open(folder).tokenizer), "words"
        )


def test_a_tokenizer_that_marks_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Dataset.open(write_dataset(tmp_path / "data", TEXTS)).tokenizer
    unmarked = tokenizer.vocabulary.__class__(**{**vars(tokenizer.vocabulary), "continuing": None})
    monkeypatch.setattr(tokenizer, "vocabulary", unmarked)
    with pytest.raises(ConfigError, match="does not mark where words begin"):
        Splitter(tokenizer, "words")
    Splitter(tokenizer, "tokens")
