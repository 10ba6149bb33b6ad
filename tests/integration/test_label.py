"""`samestep label`: a fine-tuned model labels rows, which a student learns from.

Stopped, it goes on where it was.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zstandard

from tests.integration import tasks
from tests.integration.commands import Samestep, Start
from trainer.inference import label, resumable


@pytest.fixture(scope="module")
def teacher(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A classifier that was fine-tuned, with its data and its experiment beside it."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = dataset_folder / "tokenizer"
    tasks.tune("classification", folder, finished_run, tokenizer, "training.evaluate_every=null")
    return folder / "run-classification"


def unlabeled(count: int) -> list[dict[str, Any]]:
    """Rows of texts of all lengths, some too long for the model, with a column of their own."""
    rows = tasks.classification(count, begin=1000)
    return [
        {"id": i, "text": " ".join([row["text"]] * (1 + 7 * (i % 11 == 0)))}
        for i, row in enumerate(rows)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    elif path.suffix == ".gz":
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().splitlines()]


def test_probabilities_are_those_of_transformers(
    teacher: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Row by row, in the order of the file, whatever its format."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = unlabeled(100)
    file, output = tasks.write(tmp_path / "rows.jsonl", rows), tmp_path / "labeled.jsonl.zst"
    assert samestep("label", teacher, file, "--output", output, "--batch-tokens", 200).code == 0
    found = read(output)
    assert [{"id": row["id"], "text": row["text"]} for row in found] == rows
    assert samestep("export", teacher, tmp_path / "exported").code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    given = tokenizer(
        [row["text"] for row in rows],
        truncation=True,
        max_length=24,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = model(**given).logits.softmax(-1)
    assert {tuple(row["label"]) for row in found} == {tuple(model.config.id2label.values())}
    probabilities = [list(row["label"].values()) for row in found]
    np.testing.assert_allclose(probabilities, expected.numpy(), atol=2e-6)

    with (tmp_path / "rows.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    other = tmp_path / "labeled.jsonl.gz"
    exported = (
        "label",
        tmp_path / "exported",
        tmp_path / "rows.csv",
        "--output",
        other,
        "--batch-tokens",
        200,
    )
    assert "Name them with --texts" in samestep(*exported).message
    assert samestep(*exported, "--texts", "text", "--column", "soft").code == 0
    again = read(other)
    assert [row["id"] for row in again] == [str(row["id"]) for row in rows]  # as CSV has it
    short = [
        i for i, row in enumerate(rows) if len(row["text"].split()) < 15
    ]  # the export reads 32 tokens, not 24
    np.testing.assert_allclose(
        [list(again[i]["soft"].values()) for i in short],
        [probabilities[i] for i in short],
        atol=2e-6,
    )


@pytest.mark.long
def test_a_student_learns_from_what_was_labeled(
    teacher: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """And no label of a person, also with the teacher's labels in another order."""
    file = tasks.write(tmp_path / "rows.jsonl", unlabeled(300))
    assert samestep("label", teacher, file, "--output", tmp_path / "train.jsonl.zst").code == 0
    build = yaml.safe_load((teacher.parent / "classification-data.yaml").read_text())
    build["source"]["paths"], build["output"] = (
        [str(tmp_path / "train.jsonl.zst")],
        str(tmp_path / "data"),
    )
    build["source"]["labels"] = build["source"]["labels"][::-1]
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(build))
    assert samestep("data", "build", tmp_path / "data.yaml").code == 0
    experiment = yaml.safe_load((teacher.parent / "classification.yaml").read_text())
    experiment["data"]["path"], experiment["output"] = (
        str(tmp_path / "data"),
        str(tmp_path / "student"),
    )
    experiment["objective"] = {
        "kind": "classification",
        "soft": True,
    }  # held-out rows have a label each
    (tmp_path / "student.yaml").write_text(yaml.safe_dump(experiment))
    assert samestep("train", tmp_path / "student.yaml").code == 0
    (last,) = (row for row in tasks.rows_of(tmp_path / "student") if "heldout/accuracy" in row)
    assert last["heldout/accuracy"] > 0.9


@pytest.mark.long
def test_regressions_give_numbers(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Of pairs of texts."""
    assert (
        samestep(
            "data", "build", tasks.write_build("regression", tmp_path, dataset_folder / "tokenizer")
        ).code
        == 0
    )
    assert (
        samestep(
            "train", tasks.write_experiment("regression", tmp_path, finished_run, steps=120)
        ).code
        == 0
    )
    rows = tasks.regression(40, begin=500)
    output = tmp_path / "labeled.jsonl"
    bare = tasks.write(tmp_path / "rows.jsonl", [{"a": row["a"], "b": row["b"]} for row in rows])
    assert samestep("label", tmp_path / "run-regression", bare, "--output", output).code == 0
    found = [row["score"] for row in read(output)]
    assert np.corrcoef(found, [row["score"] for row in rows])[0, 1] > 0.8


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_one_that_is_stopped_goes_on_to_the_same_bytes(
    suffix: str, teacher: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label, "_ROWS", 16)
    file = tasks.write(tmp_path / "rows.jsonl", unlabeled(100))
    whole, output = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    assert samestep("label", teacher, file, "--output", whole).code == 0
    assert len(read(whole)) == 100
    partial, state = (tmp_path / f"out.{suffix}.{name}" for name in ("partial", "progress"))
    add, taken = resumable.Resumable.add, 0

    def add_some(grown: Any, lines: bytes, records: int, rows: int) -> None:
        nonlocal taken
        if taken in (3, 5):  # while a piece is being written: some of its bytes are on the disk
            taken += 1
            grown._file.write(b"cut short")
            raise OSError(28, "No space left on device")
        taken += 1
        add(grown, lines, records, rows)

    monkeypatch.setattr(resumable.Resumable, "add", add_some)
    for _ in range(2):
        assert samestep("label", teacher, file, "--output", output).code == 1
        assert not output.exists()
        assert partial.exists()
    other = samestep("label", teacher, file, "--output", output, "--batch-tokens", 99).message
    assert "begun with another batch_tokens" in other
    assert samestep("label", teacher, file, "--output", output).code == 0
    assert output.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    assert not state.exists()
    assert (
        "exists already and is complete"
        in samestep("label", teacher, file, "--output", output).message
    )


HELD = """
import sys
import time
from samestep import cli
from trainer.inference import label, resumable

add = resumable.Resumable.add

def add_one(*arguments):
    add(*arguments)
    time.sleep(1000)

resumable.Resumable.add = add_one
cli.main()
"""


@pytest.mark.long
def test_one_that_is_killed_goes_on(
    teacher: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    file = tasks.write(tmp_path / "rows.jsonl", unlabeled(5000))
    output = tmp_path / "out.jsonl.zst"
    process = start(
        "label", teacher, file, "--output", output, command=(sys.executable, "-c", HELD)
    )
    state = tmp_path / "out.jsonl.zst.progress"
    while not state.exists():
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.01)
    assert "another process writes" in samestep("label", teacher, file, "--output", output).message
    process.popen.kill()
    process.popen.wait()
    assert 0 < json.loads(state.read_text())["records"] < 5000
    assert samestep("label", teacher, file, "--output", output).code == 0
    assert [row["id"] for row in read(output)] == list(range(5000))


def test_what_cannot_be_labeled_is_named(
    teacher: Path, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    rows = unlabeled(4)
    file, output = tasks.write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    ask = ("label", teacher, file, "--output", output)
    assert (
        "rows.jsonl:1: no column 'body': there are id, text"
        in samestep(*ask, "--texts", "body").message
    )
    assert not list(tmp_path.glob("out*"))
    assert (
        "has the head language_model"
        in samestep("label", finished_run, file, "--output", output).message
    )
    assert (
        "Use a name that ends in .jsonl"
        in samestep("label", teacher, file, "--output", tmp_path / "o.csv").message
    )
    assert "name another column for the label" in samestep(*ask, "--column", "text").message
    assert (
        "no file matches"
        in samestep("label", teacher, tmp_path / "none.jsonl", "--output", output).message
    )
    tasks.write(file, [*rows[:2], {"id": 9, "text": " "}, {"id": 10, "text": "\u200b"}, *rows[2:]])
    assert "rows.jsonl:3: empty text" in samestep(*ask).message
    done = samestep(*ask, "--on-error", "skip")
    assert done.code == 0
    assert "4 rows; 2 were left out" in done.err
    assert [row["id"] for row in read(output)] == [0, 1, 2, 3]
