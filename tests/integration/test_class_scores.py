"""Scores of classes by `samestep evaluate`, and where each predicted row is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.label_counts import count_labels
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.integration.test_finetuning import check_predict
from trainer.monitoring.report import Report
from trainer.training.weights.loading import load_weights


@pytest.mark.long
def test_predictions_name_the_lines_of_rows_after_skipped_ones(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer")
    heldout = tmp_path / "classification-dev.jsonl"
    lines = heldout.read_text().splitlines(keepends=True)
    lines[20:20] = ["{\n", json.dumps({"text": "a", "label": "unknown"}) + "\n", "\n"]
    heldout.write_text("".join(lines))
    assert samestep("data", "build", file, "on_error=skip").code == 0
    experiment = tasks.write_experiment("classification", tmp_path, finished_run, steps=2)
    settings = ("schedule.warmup_steps=0", "objective.class_weights={about_file: 3}")
    assert samestep("train", experiment, *settings).code == 0
    run, scores = tmp_path / "run-classification", tmp_path / "scores.json"
    found = {}
    for processes in (2, 1):
        file = tmp_path / f"predictions-{processes}.jsonl"
        options = ("--predictions", file, "--scores", scores, "--processes", processes)
        done = samestep("evaluate", run, *options, "strategy=ddp")
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[processes] = json.loads(scores.read_text())["per_class"]
    assert [row["row"] for row in rows] == list(range(60))
    for row in rows:
        assert row["file"] == str(heldout)
        source = json.loads(heldout.read_text().split("\n")[row["line"] - 1])
        assert (row["texts"], row["label"]) == ([source["text"]], source["label"])
    check_predict("classification", run, rows)
    assert [row["line"] for row in rows[19:22]] == [20, 24, 25]
    # Counts are the same at any number of processes, and agree with the predictions.
    assert found[1] == found[2]
    counts = [
        [sum((row["label"], row["prediction"]) == (label, other) for row in rows)
         for other in tasks.LABELS]
        for label in tasks.LABELS
    ]  # fmt: skip
    assert found[1]["confusion"] == counts
    assert {name: row["support"] for name, row in found[1]["classes"].items()} == dict.fromkeys(
        tasks.LABELS, 30
    )
    assert "Confusion matrix" in done.out
    stored = json.loads((run / "classes.json").read_text())
    assert stored == {"step": 2, "of": str(tmp_path / "data-classification"), **found[1]}
    (on_page,) = Report([str(run)]).data()["runs"]
    assert on_page["classes"] == stored


@pytest.mark.long
def test_weights_of_tags_leave_the_same_bits_and_are_stored(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    build = tasks.write_build("tagging", tmp_path, dataset_folder / "tokenizer")
    assert samestep("data", "build", build).code == 0
    file = tasks.write_experiment("tagging", tmp_path, finished_run, steps=4)
    weighted = ["schedule.warmup_steps=0", "objective.class_weights=balanced"]
    # A plan has no rows to count.
    assert samestep("plan", file, "--devices", 1, *weighted).code == 0
    exact = [
        *("strategy=ddp", "training.exact=bitwise", "training.micro_batch_size=3"),
        *("accelerator={kind: cpu, threads: 1}", "objective.label_smoothing=0.1"),
    ]
    runs = [tmp_path / "one", tmp_path / "two"]
    for processes, run in enumerate(runs, start=1):
        options = (f"output={run}", "--processes", processes)
        assert samestep("train", file, *options, *weighted, *exact).code == 0
    one, two = map(load_weights, runs)
    for name in one.tensors:
        assert torch.equal(one.tensors[name], two.tensors[name]), name
    stored = yaml.safe_load((runs[0] / "config.yaml").read_text())["objective"]["class_weights"]
    counts = count_labels(Dataset.open(tmp_path / "data-tagging"))
    assert counts is not None
    balanced = counts.splits["train"].sum() / (3 * counts.splits["train"])
    assert stored == pytest.approx(dict(zip(counts.labels, balanced.tolist(), strict=True)))
