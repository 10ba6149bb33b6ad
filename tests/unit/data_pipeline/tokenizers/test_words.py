"""Ids looked up word by word are the ids of the whole text."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from data_pipeline.tokenizers import words
from data_pipeline.tokenizers.huggingface import HuggingFace
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from data_pipeline.tokenizers.words import WordEncoder, ends_tokens_with_words

TEXTS = [topics[name] for name in sorted(topics)]
# All that either side takes for white space, controls, combining marks, joiners, digits, quotes,
# other scripts.
WHITE = "".join(chr(c) for c in range(0x3001) if chr(c).isspace()) + "\u180e\u200b\u2060\ufeff"
HARD = (
    WHITE
    + "   \n\n\t\x00\x01\x1b\x7f\u0301\u0308\u200d\xad'_,.-(5²½°$ab'stÉßΣςİﬁǅ日本の한ع😀\U000e0001[MASK]<s>"  # noqa: E501
)


@pytest.fixture(
    scope="module",
    params=[
        "wordpiece",
        "wordpiece-lowercase",
        "words",
        "words-lowercase",
        "bpe",
        "bpe-lowercase",
        "wordpiece-accents",
    ],
)
def tokenizer(request) -> Tokenizer:
    algorithm, _, case = request.param.partition("-")
    accents = False if case == "accents" else None
    config = Config("unused", algorithm, 3000, lowercase=bool(case), strip_accents=accents)
    return config.train([*TEXTS[::3], HARD])


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.files()["tokenizer.json"].decode())
    backend.encode_special_tokens = True
    return backend


def encoder(tokenizer: Tokenizer) -> WordEncoder:
    backend = backend_of(tokenizer)
    assert ends_tokens_with_words(backend)
    return WordEncoder(backend, np.dtype(np.uint16))


def assert_as_whole(tokenizer: Tokenizer, texts: list[str], rounds: int = 1) -> None:
    """Compares with the tokenizer itself."""
    whole = [
        encoding.ids
        for encoding in backend_of(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    ]
    ours = encoder(tokenizer)
    for _ in range(rounds):
        for text, ids, expected in zip(texts, ours.encode_batch(texts), whole, strict=True):
            assert ids.tolist() == expected, repr(text)


def test_ordinary_text(tokenizer) -> None:
    assert_as_whole(tokenizer, TEXTS, rounds=2)


def test_any_mixture_of_characters(tokenizer) -> None:
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list(HARD), draw.integers(0, 40))) for _ in range(6000)]
    assert_as_whole(tokenizer, texts)


def test_no_texts_and_empty_texts(tokenizer) -> None:
    assert encoder(tokenizer).encode_batch([]) == []
    assert [ids.tolist() for ids in encoder(tokenizer).encode_batch(["", "a", ""])][::2] == [[], []]


def test_what_is_remembered_is_bounded_and_forgetting_changes_nothing(
    tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(words, "_MOST_CHARACTERS", 1000)
    ours, plain = encoder(tokenizer), encoder(tokenizer)
    expected = [ids.tolist() for ids in plain.encode_batch(TEXTS)]
    assert [ids.tolist() for text in TEXTS for ids in ours.encode_batch([text])] == expected
    assert sum(map(len, ours._known)) <= 1000 + len(max(TEXTS, key=len))


def changed(tokenizer: Tokenizer, **parts: object) -> tokenizers.Tokenizer:
    backend = backend_of(tokenizer)
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def test_tokenizers_of_which_nothing_is_known_encode_whole_texts(tokenizer) -> None:
    backends = [
        changed(tokenizer, pre_tokenizer=pre_tokenizers.Metaspace()),
        changed(tokenizer, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(
            tokenizer,
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ),
        changed(tokenizer, normalizer=normalizers.NFKC()),
        changed(
            tokenizer,
            normalizer=normalizers.BertNormalizer(),
            pre_tokenizer=pre_tokenizers.ByteLevel(False),
        ),
        changed(tokenizer),
    ]
    backends[-1].add_tokens(["a b"])
    for backend in backends:
        assert not ends_tokens_with_words(backend)
        expected = backend.encode("  a  b\n a b ", add_special_tokens=False).ids
        assert (
            Tokenizer(HuggingFace(backend, {})).encode_batch(["  a  b\n a b "])[0].tolist()
            == expected
        )
