"""`samestep neighbors`: the cosines are those of the vectors that the model has."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from data_pipeline.tokenizers.tokenizer import Tokenizer
from tests.integration.commands import Samestep

SENTENCES = [
    "the class statement defines an object",
    "a class is a type",
    "names of a class are attributes [of it]",
]
ROW = re.compile(r"│ (-?\d\.\d+) +│ (\S+) +│(?: (.*?) +│)?")


def rows(text: str) -> list[tuple[str, ...]]:
    """Those of both tables: cosine, token, nothing; then cosine, word, text."""
    return ROW.findall(text)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


def test_cosines(
    finished_run: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against vectors made of `samestep features` and of the exported table.

    The word is one of several pieces.
    """
    monkeypatch.setenv("COLUMNS", "200")
    query = "it defines the prefixes"
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{text}\n\n" for text in [query, *SENTENCES, SENTENCES[1]])
    )
    options = ("--layer", 1, "--top", 7)
    result = samestep(
        "neighbors",
        finished_run,
        "Prefixes",
        "--in",
        query,
        "--corpus",
        tmp_path / "corpus.txt",
        *options,
    )
    assert result.code == 0, result.err
    printed = rows(result.out)
    assert len(printed) == 14

    tokenizer = Tokenizer.load(finished_run / "tokenizer")
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in [query, *SENTENCES]))
    output = tmp_path / "states.npy"
    assert (
        samestep(
            "features",
            finished_run,
            tmp_path / "texts.txt",
            "--output",
            output,
            "--layers",
            1,
            "--pool",
            "none",
        ).code
        == 0
    )
    states, offsets = np.load(output), np.load(tmp_path / "states.offsets.npy")
    vectors = {}
    for number, (text, (_, spans)) in enumerate(
        zip([query, *SENTENCES], tokenizer.encode_aligned([query, *SENTENCES]), strict=True)
    ):
        for word in re.finditer(r"\w+", text):
            inside = (spans[:, 0] >= word.start()) & (spans[:, 1] <= word.end())
            marked = f"{text[: word.start()]}[{word[0]}]{text[word.end() :]}"
            vectors[marked] = unit(
                states[offsets[number] + 1 : offsets[number + 1] - 1][inside].mean(0)
            )
    own = vectors.pop("it defines the [prefixes]")
    expected = sorted(
        ((float(own @ vector), text) for text, vector in vectors.items()), reverse=True
    )[:7]
    assert [(cosine, text) for cosine, _, text in printed[7:]] == [
        (f"{c:.3f}", text) for c, text in expected
    ]

    assert samestep("export", finished_run, tmp_path / "exported").code == 0
    table = load_file(tmp_path / "exported" / "model.safetensors")[
        "bert.embeddings.word_embeddings.weight"
    ]
    pieces = tokenizer.encode_batch(["prefixes"])[0]
    assert len(pieces) > 1
    cosines = unit(table) @ unit(table[pieces].mean(0))
    cosines[[*pieces, *tokenizer.vocabulary.special]] = -1
    nearest = np.argsort(-cosines)[:7]
    assert [row[:2] for row in printed[:7]] == [
        (f"{cosines[i]:.3f}", tokenizer.token(i)) for i in nearest
    ]


def test_the_texts_given_are_compared_with_each_other(
    finished_run: Path, samestep: Samestep
) -> None:
    result = samestep("neighbors", finished_run, "class", "--in", *SENTENCES[:2], "--top", 3)
    found = [text for _, _, text in rows(result.out)[3:]]
    assert len(found) == 3
    assert any("a [class] is" in text for text in found)
    assert not any("[class] statement" in text for text in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("type", "--in", "a class"), "the word 'type' is not in 'a class'"),
        (("clas", "--in", "a class"), "the word 'clas' is not in 'a class'"),
        (
            ("class", "--in", "a class", "--layer", "3"),
            "--layer is 3, and the model has layers 1 to 2",
        ),
        (
            ("class", "--in", f"{'a ' * 40}class"),
            "'class' ends at token 41 and the model reads 30",
        ),
        (("class", "--in", "class"), "there is no other word to compare with"),
        (("cafe", "--in", "a cafe\u0301"), "the word 'cafe' is not in"),
        (("\udcff", "--in", "a class"), r"WORD: '\udcff' is not UTF-8"),
        (("class", "--in", "a class \udcff"), "--in: 'a class "),
        (("class", "--in", "a class", "--top", "0"), "--top must be at least 1"),
        (("class", "--in", "a class", "--field", "x"), "--field x needs --corpus"),
        (
            ("class", "--in", "a class", "--corpus", "none.txt"),
            "cannot read none.txt: No such file",
        ),
    ],
)
def test_bad_input(
    finished_run: Path, samestep: Samestep, arguments: tuple[str, ...], words: str
) -> None:
    result = samestep("neighbors", finished_run, *arguments)
    assert result.code in (1, 2)
    assert result.message.startswith(words), result.message
