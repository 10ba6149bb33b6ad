"""Labels are counted in each split, and a label without training rows is named."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.inspection.report import inspect, report
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.label_counts import LabelCounts, count_labels
from data_pipeline.sources.kinds import classification, regression, tagging
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.terminal import Console

TEXTS = ["a good film", "a bad film", "no film at all"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    config = TokenizerConfig(str(folder), "wordpiece", 60)
    config.train(TEXTS).save(folder)
    return config


def built(folder: Path, tokenizer: TokenizerConfig, source_class, rows, **settings) -> Dataset:
    files = {}
    for split, of_split in rows.items():
        files[split] = folder / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(row) + "\n" for row in of_split))
    source = source_class(
        paths=(str(files["train"]),), heldout=(str(files["heldout"]),), **settings
    )
    output = str(folder / "dataset")
    build(Config(source, tokenizer, output=output, heldout_fraction=0.1, workers=1))
    return Dataset.open(output)


def test_classes_are_counted_and_those_without_training_rows_named(tmp_path, tokenizer, caplog):
    def rows(*labels):
        return [{"text": TEXTS[i % 3], "label": label} for i, label in enumerate(labels)]

    caplog.set_level(logging.INFO)
    dataset = built(
        tmp_path,
        tokenizer,
        classification.Config,
        {
            "train": rows("bad", "good", "good", {"bad": 0.2, "good": 0.7, "odd": 0.1, "no": 0}),
            "heldout": rows("bad", "odd", "odd"),
        },
        labels=("bad", "good", "odd", "no"),
    )
    assert "labels (train / heldout): bad 1 / 1, good 3 / 0, odd 0 / 2, no 0 / 0" in caplog.text
    assert "no training row has the label no, so no model can learn it" in caplog.text
    assert "held-out rows have labels that no training row has: the label odd (2)" in caplog.text
    console = Console(file=io.StringIO(), width=100)
    report(inspect(dataset), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Labels" in printed
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert {("bad", "1", "1"), ("good", "3", "0"), ("odd", "0", "2")} <= set(map(tuple, cells))
    assert "warning: no training row has the label no" in printed


def test_tags_are_counted_by_words(tmp_path, tokenizer):
    row = {"tokens": ["film", "good", "bad"], "ner": ["O", "B-X", "O"]}
    dataset = built(
        tmp_path, tokenizer, tagging.Config, {"train": [row, row], "heldout": [row]},
        labels=("O", "B-X", "I-X"),
    )  # fmt: skip
    counts = count_labels(dataset)
    assert counts is not None
    assert {split: each.tolist() for split, each in counts.splits.items()} == {
        "train": [4, 2, 0],
        "heldout": [2, 1, 0],
    }


def test_numbers_have_no_labels_to_count(tmp_path, tokenizer):
    rows = {"train": [{"text": "film", "score": 1}], "heldout": [{"text": "a", "score": 2}]}
    assert count_labels(built(tmp_path, tokenizer, regression.Config, rows)) is None


def test_a_line_of_many_labels_has_the_most_frequent_ones():
    names = tuple(f"c{i}" for i in range(30))
    line = LabelCounts(names, {"train": np.arange(30)}).line()
    assert line.startswith("labels (train): c10 10, c11 11")
    assert line.endswith("c29 29, and 10 rarer ones")
