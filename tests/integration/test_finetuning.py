"""Fine-tuning through the real command: every kind of task from files to scores, and what bad input gets."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conformance.worker import run_once
from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks


@pytest.fixture(scope="module")
def tuned(finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier that was fine-tuned from the BERT of `finished_run`: data, experiment, run."""
    folder = tmp_path_factory.mktemp("tuned")
    often = ("checkpoint.every=20", "checkpoint.keep_last=5")
    tasks.tune("classification", folder, finished_run, dataset_folder / "tokenizer", *often)
    return folder


def test_a_classifier_learns_and_is_scored_again_and_verified(tuned: Path, samestep: Samestep) -> None:
    run = tuned / "run-classification"
    (last,) = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
    assert last["heldout/accuracy"] > 0.9
    assert last["heldout/matthews"] > 0.8
    assert "heldout/perplexity" not in last
    evaluated = samestep("evaluate", run)
    assert f"accuracy     {last['heldout/accuracy']:.6g}" in evaluated.out
    resolved = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert (resolved["head"], resolved["labels"], resolved["layers"]) == (
        "classification", ["about_class", "about_file"], 2)  # fmt: skip
    assert samestep("ledger", "verify", run).code == 0


@pytest.mark.parametrize("kind", ["regression", "multiple_choice", "question_answering", "tagging"])
def test_each_kind_of_task_learns(
    kind: str, finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    assert samestep("data", "build", tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")).code == 0
    assert samestep("train", tasks.write_experiment(kind, tmp_path, finished_run, steps=120)).code == 0
    scored = [row for row in tasks.rows_of(tmp_path / f"run-{kind}") if f"heldout/{tasks.SCORES[kind]}" in row]
    assert scored[-1][f"heldout/{tasks.SCORES[kind]}"] > 0.8, scored[-1]


def test_any_number_of_processes_makes_the_same_steps(tuned: Path, tmp_path: Path) -> None:
    """Three take the steps of one, and two go on from its checkpoint as it did."""
    shutil.copytree(tuned / "run-classification", tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000060").rename(tmp_path / "last")
    expected = [loss for _, loss in sorted(losses(tmp_path / "run").items())]
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    resolved |= {"strategy": {"kind": "ddp"}, "output": str(tmp_path / "run"), "init_from": None}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(resolved))
    file = str(tmp_path / "experiment.yaml")
    for processes in (2, 3):
        again = run_ranks(processes, run_once, file, [f"strategy={'fsdp' if processes == 2 else 'ddp'}"], 20)[0]
        np.testing.assert_allclose(again, expected[20:], rtol=1e-5)


def test_a_fine_tuned_model_serves_in_transformers(tuned: Path, tmp_path: Path, samestep: Samestep) -> None:
    from transformers import pipeline

    assert samestep("export", tuned / "run-classification", tmp_path / "exported").code == 0
    classify = pipeline("text-classification", model=str(tmp_path / "exported"), device="cpu")
    rows = [json.loads(line) for line in (tuned / "classification-dev.jsonl").read_text().splitlines()]
    said = [answer["label"] for answer in classify([row["text"] for row in rows])]
    assert np.mean([answer == row["label"] for answer, row in zip(said, rows, strict=True)]) > 0.9


@pytest.mark.parametrize(
    ("kind", "row", "settings", "message"),
    [
        ("classification", {"text": "a", "label": "c"}, {}, r"dev.jsonl:3: label 'c' is not one of: about_class"),
        ("classification", {"text": "a"}, {}, r"dev.jsonl:3: no column 'label'"),
        ("classification", {"text": " ", "label": 1}, {}, r"dev.jsonl:3: empty text"),
        ("question_answering", {"question": "?", "context": "a b", "answers": [{"text": "c", "answer_start": 0}]}, {},
         r"dev.jsonl:3: answer 'c' is not in the context"),
        ("tagging", {"tokens": ["a"], "ner": ["NAME"]}, {}, r"dev.jsonl:3: tag 'NAME' is not BIO"),
        ("multiple_choice", {"context": "a", "choices": ["b", "c", "d"], "label": 3}, {}, r"dev.jsonl:3: .*label"),
        ("regression", {"a": "a", "b": "b", "score": "x"}, {}, r"dev.jsonl:3: .*score"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(
    kind: str, row: dict, settings: dict, message: str, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    import re

    build = tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")
    tasks.write(tmp_path / f"{kind}-dev.jsonl", [*getattr(tasks, kind)(2), row, *getattr(tasks, kind)(2)])
    assert re.search(message, samestep("data", "build", build).message)
    assert samestep("data", "build", build, "on_error=skip").code == 0
    (line,) = (tmp_path / f"data-{kind}" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 3


def test_an_empty_split_is_named(dataset_folder: Path, tmp_path: Path, samestep: Samestep) -> None:
    build = tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer")
    (tmp_path / "classification-dev.jsonl").write_text("")
    assert "classification-dev.jsonl" in samestep("data", "build", build).message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective=tagging"], "holds rows for classification"),
        (["data.packing=concat"], "data.packing=padded"),
        (["model.labels=[x,y,z]"], """set model.labels='["about_class", "about_file"]'"""),
        (["objective.metrics=[bleu]"], "bleu"),
        (["init_from=nowhere"], "nowhere"),
        (["model.layers=3"], "another model"),
        (["data.sequence_length=64"], "model.max_positions"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: list[str], message: str, tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("train", tuned / "classification.yaml", f"output={tmp_path / 'run'}", *settings)
    assert message in result.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_commands_that_need_words_say_what_to_use_instead(tuned: Path, samestep: Samestep) -> None:
    run, said = tuned / "run-classification", "classification head, which "
    assert f"{said}predicts no words and fills no masks; use the model" in samestep("fill", run, "a [MASK]").message
    assert f"{said}predicts no words; use one with" in samestep("generate", run, "the").message
    assert f"{said}writes no text; leave --generate out" in samestep("evaluate", run, "--generate").message


def test_a_missing_package_is_named_before_the_first_step(
    tuned: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where there is something to score."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    short = ["training.steps=2", "schedule.warmup_steps=1"]
    train = ["train", tuned / "classification.yaml", f"output={tmp_path / 'run'}", *short]
    assert "pip install 'samestep[tasks]'" in samestep(*train).message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert samestep(*train, "training.evaluate_every=null").code == 0
    assert "pip install 'samestep[tasks]'" in samestep("evaluate", tmp_path / "run").message
    dataset, experiment = tuned / "data-classification", tuned / "classification.yaml"
    assert "→ about_" in samestep("data", "show", dataset, "--objective", experiment).out
    assert samestep("plan", experiment, "--devices", 2, "--strategy", "ddp").code == 0
