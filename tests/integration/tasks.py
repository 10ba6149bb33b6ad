"""Small tasks that a tiny model learns in seconds.

Files of rows, and the sections of configurations that read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from samestep.cli import main
from tests.integration.commands import Start

NAMES = ("class", "file", "list", "name", "number", "object", "string", "type", "value", "function")
FILL = ("the", "a", "of", "is", "to", "with", "in", "for", "and", "not")

LABELS = ("about_class", "about_file")

Rows = list[dict[str, Any]]


def _words(number: int, count: int) -> list[str]:
    """Words without meaning, each text's own."""
    return [FILL[(number * 7 + place * (number // 10 + 3)) % 10] for place in range(count)]


def classification(count: int, begin: int = 0) -> Rows:
    """Whether a text speaks of a class or of a file."""
    rows = []
    for number in range(begin, begin + count):
        words = _words(number, 3 + number % 5)
        words.insert(number % 3, NAMES[number % 2])
        rows.append({"text": " ".join(words), "label": LABELS[number % 2]})
    return rows


def regression(count: int, begin: int = 0) -> Rows:
    """How often a text says "list", beside another text."""
    rows = []
    for number in range(begin, begin + count):
        times = number % 4
        rows.append(
            {
                "a": " ".join([*_words(number, 4), *["list"] * times]),
                "b": "value",
                "score": float(times),
            }
        )
    return rows


def multiple_choice(count: int, begin: int = 0) -> Rows:
    """Which of three texts says "string"."""
    rows = []
    for number in range(begin, begin + count):
        choices = [" ".join([*_words(number + 5 * place, 2), "type"]) for place in range(3)]
        choices[number % 3] = " ".join([*_words(number, 2), "string"])
        rows.append(
            {"context": " ".join(_words(number, 3)), "choices": choices, "label": number % 3}
        )
    return rows


def question_answering(count: int, begin: int = 0) -> Rows:
    """Which word follows "name"; some texts do not say it."""
    rows = []
    for number in range(begin, begin + count):
        answer = NAMES[4 + number % 6]
        before = " ".join(_words(number, 2 + number % 6)) + " "
        if number % 4 == 3:
            rows.append(
                {
                    "id": str(number),
                    "question": "name?",
                    "context": f"{before}and more.",
                    "answers": [],
                }
            )
            continue
        text = f"{before}name {answer}, and more."
        found = [{"text": answer, "answer_start": len(before) + 5}]
        rows.append({"id": str(number), "question": "name?", "context": text, "answers": found})
    return rows


def tagging(count: int, begin: int = 0) -> Rows:
    """Names, of one word or two."""
    rows = []
    for number in range(begin, begin + count):
        tokens, ner = _words(number, 3 + number % 4), ["O"] * (3 + number % 4)
        tokens[1:1], ner[1:1] = [NAMES[number % 5], "value"], ["B-NAME", "I-NAME"]
        rows.append({"tokens": tokens, "ner": ner})
    return rows


SOURCES: Mapping[str, dict[str, Any]] = {
    "classification": {"texts": ["text"], "labels": list(LABELS)},
    "regression": {"texts": ["a", "b"]},
    "multiple_choice": {"context": "context", "choices": ["choices"]},
    "question_answering": {},
    "tagging": {"labels": ["O", "B-NAME", "I-NAME"]},
}
OBJECTIVES: Mapping[str, dict[str, Any]] = {
    "classification": {"metrics": ["accuracy", "f1", "matthews"]},
    "regression": {"metrics": ["pearson", "spearman"]},
    "multiple_choice": {"choices": 3},
    "question_answering": {"stride": 8, "question_length": 8, "impossible": True},
    "tagging": {},
}
SCORES = {
    "classification": "accuracy",
    "regression": "pearson",
    "multiple_choice": "accuracy",
    "question_answering": "f1",
    "tagging": "entity_f1",
}
"""The score of each by which its runs are compared."""


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def source(kind: str, folder: Path, rows: int = 240) -> dict[str, Any]:
    """Writes the rows of a task, and gives the section of a build that reads them."""
    make = globals()[kind]
    train, heldout = (
        write(folder / f"{kind}.jsonl", make(rows)),
        write(folder / f"{kind}-dev.jsonl", make(60, rows)),
    )
    return {"kind": kind, "paths": [str(train)], "heldout": [str(heldout)], **SOURCES[kind]}


def build_rows(folder: Path, source: Mapping[str, Any], tokenizer: Path, **changes: Any) -> Path:
    """Builds a dataset from the section `source`; returns its folder, FOLDER/data."""
    tree = {"source": dict(source), "tokenizer": {"path": str(tokenizer)}, "workers": 1}
    tree |= {"output": str(folder / "data"), **changes}
    assert main(["data", "build", str(_write_yaml(folder / "data.yaml", tree))]) == 0
    return folder / "data"


def build_words(folder: Path, rows: Rows, **tokenizer: Any) -> Path:
    """Builds a dataset of rows with a text, tokenized as whole words; returns its folder."""
    build = {
        "source": {"kind": "jsonl", "paths": [str(write(folder / "corpus.jsonl", rows))]},
        "tokenizer": {"path": str(folder / "words"), "algorithm": "words", **tokenizer},
        "output": str(folder / "data"),
        "workers": 1,
        "heldout_fraction": 0.1,
    }
    file = _write_yaml(folder / "data.yaml", build)
    for command in ("tokenizer", "build"):
        assert main(["data", command, str(file)]) == 0
    return folder / "data"


def write_build(kind: str, folder: Path, tokenizer: Path) -> Path:
    """A file for `samestep data build`; the dataset goes to folder/data-KIND."""
    tree = {"source": source(kind, folder), "tokenizer": {"path": str(tokenizer)}, "workers": 1}
    return _write_yaml(
        folder / f"{kind}-data.yaml", tree | {"output": str(folder / f"data-{kind}")}
    )


def write_experiment(kind: str, folder: Path, checkpoint: Path, steps: int = 60) -> Path:
    """A file for `samestep train`: a second or two; the run goes to folder/run-KIND."""
    tree = {
        "output": str(folder / f"run-{kind}"),
        "accelerator": "cpu",
        "init_from": str(checkpoint),
        "data": {
            "path": str(folder / f"data-{kind}"),
            "sequence_length": 24,
            "packing": "padded",
            "lanes": 8,
        },
        "objective": {"kind": kind, **OBJECTIVES[kind]},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "schedule": {"warmup_steps": 6},
        "training": {
            "steps": steps,
            "global_batch_size": 12,
            "log_every": 1,
            "evaluate_every": steps,
        },
        "checkpoint": {"every": 1000},
        "strategy": "single",
    }
    return _write_yaml(folder / f"{kind}.yaml", tree)


def retrieval(
    folder: Path, rows: Rows, train: int, tokenizer: Path, length: int, **sections: Any
) -> dict[str, Any]:
    """Builds a dataset of retrieval, and gives an experiment on it, of a new model.

    Args:
        train: number of rows to train on; the others are held out.
        length: `data.sequence_length`.
        sections: of the experiment.
    """
    source = {
        "kind": "retrieval",
        "paths": [str(write(folder / "train.jsonl", rows[:train]))],
        "heldout": [str(write(folder / "dev.jsonl", rows[train:]))],
    }
    dataset = build_rows(folder, source, tokenizer)
    tree: dict[str, Any] = yaml.safe_load(
        write_experiment("regression", folder, folder).read_text()
    )
    del tree["init_from"]
    tree["data"] |= {"path": str(dataset), "sequence_length": length}
    return tree | sections


def tune(kind: str, folder: Path, checkpoint: Path, tokenizer: Path, *overrides: str) -> Path:
    """Builds the data of a task and fine-tunes a checkpoint on it, beside each other.

    Returns the experiment's file.
    """
    assert main(["data", "build", str(write_build(kind, folder, tokenizer))]) == 0
    experiment = write_experiment(kind, folder, checkpoint)
    assert main(["train", str(experiment), *overrides]) == 0
    return experiment


def write_task(kind: str, folder: Path) -> Path:
    """A file for `samestep finetune-suite`."""
    tree = {
        "source": source(kind, folder, rows=96),
        "objective": {"kind": kind, **OBJECTIVES[kind]},
        "score": SCORES[kind],
        "epochs": 2,
        "sequence_length": 24,
        "grid": {"optimizer.lr": [3e-3, 1e-3]},
        "published": {SCORES[kind]: 50.0},
        "experiment": {
            "training": {"global_batch_size": 12},
            "data": {"lanes": 8},
            "accelerator": "cpu",
        },
    }
    return _write_yaml(folder / f"{kind}.yaml", tree)


def _write_yaml(path: Path, tree: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False), encoding="utf-8")
    return path


def assert_same_in_three_processes(
    start: Start, experiment: Path, run: Path, output: Path, *settings: str
) -> None:
    """Trains an experiment under FSDP2, and compares all losses with those of `run`."""
    arguments = ("train", experiment, f"output={output}", *settings, "strategy=fsdp")
    assert start(*arguments, "--processes", 3).wait(300).code == 0
    alone, three = (
        [row["train/loss"] for row in rows_of(each) if "train/loss" in row]
        for each in (run, output)
    )
    np.testing.assert_allclose(three, alone, rtol=1e-4, atol=1e-5)


def rows_of(run: Path) -> Sequence[dict[str, Any]]:
    """The rows of metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
