"""The files and commands of docs/own_classifier.md, from a CSV to predictions."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest

import samestep as library
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.unit.project.test_docs_blocks import DOCS, blocks, shell_lines

BASE = "hf://answerdotai/ModernBERT-base"
SUBJECTS = {"account": "name", "billing": "number", "shipping": "list"}


@pytest.mark.long
def test_the_page_works_as_it_stands(
    finished_run: Path,
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "support.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label"))
        for number in range(300):
            label = list(SUBJECTS)[number % 3]
            words = [tasks.FILL[number // 10**place % 10] for place in range(3)]
            table.writerow((f"{SUBJECTS[label]}, {' '.join(words)}", label))
    page = blocks(DOCS / "own_classifier.md")
    for block in page:
        if block.label == "yaml":
            name = block.text.split("\n", 1)[0].removeprefix("# ")
            tokenizer = "tokenizer: {path: "
            text = block.text.replace(
                tokenizer + BASE, f"{tokenizer}{dataset_folder / 'tokenizer'}"
            )
            Path(name).write_text(text.replace(BASE, str(finished_run)))
    commands = [shlex.split(line) for block in page for line in shell_lines(block)]
    assert [command[1] for command in commands] == [
        *("data", "data", "train", "evaluate", "report", "export"),
    ]
    # The model of this test is small: 32 positions, and a rate for random weights.
    small = {"train": ("data.sequence_length=32", "optimizer.lr=1e-2", "accelerator=cpu")}
    for command in commands:
        result = samestep(*command[1:], *small.get(command[1], ()))
        assert result.code == 0, result.err
    scores = json.loads(Path("support_scores.json").read_text())
    assert scores["accuracy"] > 0.8
    assert set(scores["per_class"]["classes"]) == set(SUBJECTS)
    rows = [json.loads(line) for line in Path("support_predictions.jsonl").read_text().splitlines()]
    lines = Path("support.csv").read_text().splitlines()
    assert all(row["texts"][0] in lines[row["line"] - 1].replace('"', "") for row in rows)
    found = library.load_model("runs/support/best").predict([row["texts"][0] for row in rows])
    labels = [each.label for each in found if isinstance(each, library.ClassPrediction)]
    assert labels == [row["prediction"] for row in rows]
