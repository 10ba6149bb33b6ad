"""Folders of word vectors: written, read, searched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import ConfigError, DataError
from trainer.vectors.folder import WordVectors, is_folder, nearest

WORDS = ["play", "plays", "game", "theatre", "river"]
TEXTS = ["Play plays the game in the theatre by the river"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Config("", "wordpiece", 200, lowercase=True).train(TEXTS)


def vectors_of(tokenizer: Tokenizer, tokens: bool = False) -> WordVectors:
    table = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([int(tokenizer.encode_batch([word])[0][0]) for word in WORDS])
    description = {"settings": {"dimensions": 4, "method": "cbow"}, "tokenizer": "..."}
    return WordVectors(list(WORDS), table, ids if tokens else None, description, tokenizer)


@pytest.mark.parametrize("tokens", [False, True])
def test_what_is_written_is_read(tmp_path: Path, tokenizer: Tokenizer, tokens: bool) -> None:
    made, folder = vectors_of(tokenizer, tokens), tmp_path / "vectors"
    made.save(folder, text=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokenizer",
        "vectors.json",
        "vectors.safetensors",
        "words.txt",
    ]
    read = WordVectors.load(folder)
    assert is_folder(folder)
    assert read.words == WORDS
    assert torch.equal(read.vectors, made.vectors)
    assert read.description == made.description
    assert read.tokenizer.fingerprint == tokenizer.fingerprint
    assert (read.tokens is None) == (not tokens)
    if read.tokens is not None:
        assert made.tokens is not None
        assert torch.equal(read.tokens, made.tokens)


def test_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = vectors_of(tokenizer)
    made.words[-1:] = ["two words\n"]
    made.save(tmp_path, text=True)
    first, *lines = (tmp_path / "vectors.txt").read_text().splitlines()
    assert first == "5 4"
    assert [line.split(" ")[0] for line in lines] == [*WORDS[:-1], "two_words_"]
    assert (tmp_path / "words.txt").read_text().splitlines()[-1] == "two_words_"
    numbers = torch.tensor([[float(value) for value in line.split(" ")[1:]] for line in lines])
    assert torch.equal(numbers, made.vectors)


def test_find(tokenizer: Tokenizer) -> None:
    made = vectors_of(tokenizer)
    assert made.find("game") == [2]
    assert made.find("Game") == [2]  # the tokenizer has lower case only
    assert made.find("play game") == [0, 2]
    assert made.find("play chess") == [0]
    with pytest.raises(ConfigError, match=r"the word 'theater' is not among the 5 .* has theatre"):
        made.find("theater")
    with pytest.raises(ConfigError, match=r"the word '\.\.\.' is not among"):
        made.find("...")
    of_tokens = vectors_of(tokenizer, tokens=True)
    assert of_tokens.find("river") == [4]
    with pytest.raises(ConfigError, match="the word 'the' is not among the 5"):
        of_tokens.find("the")


def test_nearest() -> None:
    table = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.1, 3.0], [-1.0, 0.0], [0.0, 0.0]])
    assert [row for _, row in nearest(table, [0], [0], 10)] == [1, 2, 4, 3]
    assert [row for _, row in nearest(table, [0, 2], [0, 2], 1)] == [1]
    assert [row for _, row in nearest(table, [0], [0, 1], 1)] == [2]
    ((cosine, _),) = nearest(table, [0], [0], 1)
    assert cosine == pytest.approx(2 / 4.01**0.5)


def test_damage(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        DataError, match=r"is not a folder of word vectors: it has no vectors\.json"
    ):
        WordVectors.load(tmp_path / "none")
    folder = tmp_path / "vectors"
    vectors_of(tokenizer).save(folder, text=False)
    words = folder / "words.txt"
    words.write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"has 2 words and vectors of the shape \(5, 4\)"):
        WordVectors.load(folder)
    words.unlink()
    with pytest.raises(DataError, match=r"cannot read the word vectors in .*No such file"):
        WordVectors.load(folder)
    tensors = folder / "vectors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    words.write_text("\n".join(WORDS) + "\n")
    with pytest.raises(DataError, match="cannot read the word vectors"):
        WordVectors.load(folder)
    (folder / "vectors.json").write_text("{")
    with pytest.raises(DataError, match="cannot read the word vectors"):
        WordVectors.load(folder)
