"""Sentences are cut where a reader would, and cutting them changes no token."""

import itertools

import numpy as np
import pytest

from data_pipeline.tokenizers.sentences import split, splitter_version
from data_pipeline.tokenizers.tokenizer import Config

FULL_WIDTH = (
    "\u4eca\u65e5\u306f\u3002\u660e\u65e5\u306f\uff01\u306f\u3044\uff1f"  # three, without spaces
)


@pytest.mark.parametrize(
    "sentences",
    [
        ["It is late.", " We go home!", " Why?", " Because..."],
        ['"Stop!"', " He ran.", " (They followed.)", " “Where?”", " «Here.»", " Done."],
        ["Dr. Smith met J. R. R. Tolkien, Mrs. Grey et al. in St. Ives.", " They talked."],
        ["He paid approx. 3 francs, vs. 4.5 before.", " 1918 was over."],
        ["She asked why? and left... without a word.", " Then nothing."],
        ["example.com and v1.2.3 are no ends.", " This is."],
        [
            "A heading\n",
            "\nA paragraph that goes on\nin the next line.",
            "\nAnother sentence.\n \n",
            "\nThe last",
        ],
        ["Really?!", " Yes…", " Or no."],
        ["élan vital.", " Été.", " Über alles."],
        [FULL_WIDTH[:4], FULL_WIDTH[4:8], FULL_WIDTH[8:]],
        ["No mark at all"],
        ["  Leading space.", " Trailing space.  \n\n "],
        [""],
    ],
    ids=lambda sentences: sentences[0][:12],
)
def test_rules(sentences: list[str]) -> None:
    assert split("".join(sentences), "rules") == sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["one. two", "\nThree", "\nfour \n", "\nfive\n"],
        ["one\n ", "\ttwo"],
        ["\n\n one", "\ntwo\n\n"],
        ["one"],
        [""],
        ["\n \n"],
    ],
    ids=str,
)
def test_lines(sentences: list[str]) -> None:
    assert split("".join(sentences), "lines") == sentences


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Random strings of what may meet where one sentence ends and the next begins."""
    parts = [
        "the",
        "The",
        "fox",
        "Dr",
        "J",
        "3",
        "don't",
        "é",
        "\u4eca",
        ".",
        ".",
        "!",
        "?",
        "…",
        "\u3002",
        '"',
        "”",
        "(",
        ")",
    ]
    parts += [" ", " ", " ", " ", "  ", "\n", "\n\n", " \n \n ", "\t", "\r\n", "\u00a0", "\u3000"]
    draw = np.random.default_rng(0)
    return ["".join(draw.choice(parts, draw.integers(0, 120))) for _ in range(400)]


@pytest.mark.parametrize("splitter", ["rules", "lines"])
def test_sentences_are_the_text_and_none_is_empty(texts: list[str], splitter) -> None:
    found = [split(text, splitter) for text in texts]
    assert ["".join(sentences) for sentences in found] == texts
    assert all(
        sentence.strip() for sentences in found if len(sentences) > 1 for sentence in sentences
    )
    assert sum(len(sentences) for sentences in found) > 1000


@pytest.mark.parametrize("splitter", ["rules", "lines"])
@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])
def test_sentences_have_the_tokens_of_the_text(texts: list[str], algorithm: str, splitter) -> None:
    tokenizer = Config("unused", algorithm, vocab_size=400).train(
        [*texts, "The fox and the fox. " * 9]
    )
    for text, whole in zip(texts, tokenizer.encode_batch(texts), strict=True):
        parts = tokenizer.encode_batch(split(text, splitter))
        assert (
            list(itertools.chain.from_iterable(part.tolist() for part in parts)) == whole.tolist()
        ), repr(text)


def test_splitters_have_versions() -> None:
    """Boundaries are part of a dataset.

    Whoever changes them raises the number, so that no build mixes two.
    """
    assert [splitter_version(name) for name in ("rules", "lines")] == ["rules 1", "lines 1"]
