"""`samestep data show` prints rows of tasks with what a model has to predict, by name."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.writing import write_shard
from data_pipeline.inspection.show import show
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.terminal import Console

CAT = "the cat sat on the mat"


def shown(
    folder: Path, kind: str, texts: list[str], label: list[float], names: list[str], *settings: str
) -> Any:
    """What is printed of a dataset with one row, a line each.

    Labels of tags and spans are of words.
    """
    tokenizer = TokenizerConfig("x", "wordpiece", 400).train(
        [CAT, "a dog barks", "where did it sit"] * 30
    )
    tokenizer.save(folder / "tokenizer")
    words = [[len(tokens) for tokens in tokenizer.encode_batch(text.split())] for text in texts]
    before, last = sum(map(sum, words[:-1])), [0, *itertools.accumulate(words[-1])]
    assert max(words[-1]) > 1 or kind not in (
        "tagging",
        "question_answering",
    )  # so that words and tokens are not the same
    values = np.array(label, dtype=np.float32)
    if kind == "tagging":
        values = np.full(last[-1], -1, dtype=np.float32)
        values[last[:-1]] = label
    elif kind == "question_answering" and label:
        values = np.array(
            [before + last[int(label[0])], before + last[int(label[1]) + 1] - 1], dtype=np.float32
        )
    starts = np.cumsum([0, *map(sum, words[:-1])])
    row = np.concatenate(tokenizer.encode_batch(texts))
    origin = np.array([(0, 7)], dtype=np.uint32)
    shard = write_shard(
        folder / "train-000000.tar", [row], origin, np.dtype(np.uint16), [starts], [values]
    )
    size, task = tokenizer.vocabulary.size, {"task": {"target": kind, "labels": names}}
    splits = {"train": (shard,), "heldout": ()}
    manifest = Manifest(
        FORMAT, tokenizer.fingerprint, size, "uint16", {}, ("rows.jsonl",), 1, {}, splits, task
    )
    manifest.save(folder)
    (folder / "experiment.yaml").write_text(
        "data: {path: elsewhere, packing: padded, sequence_length: 32, lanes: 1}"
    )
    console = Console(file=io.StringIO(), width=100)
    show(str(folder), str(folder / "experiment.yaml"), settings, 0, 1, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().partition("rows.jsonl:7\n")[2].splitlines()


@pytest.mark.parametrize(
    ("kind", "texts", "label", "names", "settings", "lines"),
    [
        (
            "classification",
            [CAT, "a dog"],
            [1],
            ["no", "[b]yes"],
            ["objective=classification"],
            [f"  {CAT}", "  a dog", "→ [b]yes"],
        ),
        (
            "classification",
            [CAT],
            [0.25, 0.75],
            ["no", "yes"],
            ["objective={kind: classification, soft: true}"],
            [f"  {CAT}", "→ no 0.25, yes 0.75"],
        ),
        (
            "regression",
            [CAT, "a dog"],
            [2.5],
            [],
            ["objective=regression"],
            [f"  {CAT}", "  a dog", "→ 2.5"],
        ),
        (
            "multiple_choice",
            ["a dog", "sat", CAT, "barks"],
            [1],
            [],
            ["objective={kind: multiple_choice, choices: 3}"],
            ["  a dog", "  sat", f"  [→ {CAT}]", "  barks"],
        ),
        (
            "tagging",
            ["the horse dog barks"],
            [0, 1, 2, 0],
            ["O", "B-PET", "I-PET"],
            ["objective=tagging"],
            ["  the [B-PET horse] [I-PET dog] barks"],
        ),
        (
            "question_answering",
            ["where did it sit", f"horse {CAT}"],
            [5, 6],
            [],
            ["objective={kind: question_answering, stride: 8}", "objective.question_length=10"],
            ["  where did it sit", "  horse the cat sat on [→ the mat]"],
        ),
        (
            "question_answering",
            ["where did it sit", f"horse {CAT}"],
            [],
            [],
            ["objective={kind: question_answering, stride: 8}", "objective.question_length=10"],
            ["  where did it sit", f"  horse {CAT}", "→ no answer here"],
        ),
    ],
    ids=[
        "classification",
        "soft",
        "regression",
        "multiple_choice",
        "tagging",
        "question_answering",
        "none",
    ],
)
def test_labels_are_named(
    kind: str,
    texts: list[str],
    label: list[float],
    names: list[str],
    settings: list[str],
    lines: list[str],
    tmp_path: Path,
) -> None:
    assert shown(tmp_path, kind, texts, label, names, *settings) == lines


def test_an_answer_that_no_window_holds_is_not_marked(tmp_path: Path) -> None:
    """As the model sees it, which is to say that there is no answer in such a window."""
    settings = ["objective={kind: question_answering, stride: 1}", "objective.question_length=1"]
    texts = ["it", f"{CAT} horsehorse"]
    lines = shown(
        tmp_path, "question_answering", texts, [5, 6], [], *settings, "data.sequence_length=8"
    )
    assert lines[-1] == "→ no answer here"
    assert "[→" not in "".join(lines)
