"""What a suite computes before any run: the devices of runs, and the score of a constant answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import multiple_choice, question_answering, table_pairs
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from trainer.objectives.kinds import multiple_choice as choosing
from trainer.objectives.kinds import question_answering as answering
from trainer.objectives.kinds import seq2seq
from trainer.studies.execution import slots
from trainer.studies.finetune.chance import constant_scores, upper_end
from trainer.studies.finetune.runs import Run
from trainer.studies.finetune.suite import Result, Suite


@pytest.mark.parametrize(
    ("gpus", "visible", "parallel", "devices"),
    [
        (0, None, None, [None]),
        (0, None, 2, [None, None]),
        (1, "3", None, [None]),
        (3, None, None, ["0", "1", "2"]),
        (2, "4,6", None, ["4", "6"]),
        (2, "GPU-a,GPU-b", 1, ["GPU-a"]),
        (2, "4,6", 3, ["4", "6", "4"]),
    ],
)
def test_each_run_has_a_gpu_of_those_that_are_visible(
    gpus: int,
    visible: str | None,
    parallel: int | None,
    devices: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in slots(parallel, on_cpu=False)] == devices
    assert slots(None, on_cpu=True) == [{}]


def test_the_end_of_a_suite_counts_what_running_runs_have_done(tmp_path: Path) -> None:
    runs = [
        Run(
            task="rte",
            settings={},
            experiment={"training": {"steps": 100}},
            metrics=("accuracy",),
            score="accuracy",
            constants={},
            learns_above=0.5,
            evaluations={},
            depends_on=(),
            folder=tmp_path / "runs" / "rte" / str(seed),
            seed=seed,
            digest=str(seed),
        )
        for seed in range(2)
    ]
    result = Result("rte", runs[0].name, {}, 0, "0", {"accuracy": 0.5}, 100, 50.0, False)
    (tmp_path / "results.jsonl").write_text(json.dumps(asdict(result)) + "\n")
    suite = Suite(tmp_path, runs)
    found = suite.left(1)
    assert found is not None
    assert found.middle == pytest.approx(50.0)
    (runs[1].folder / "checkpoints").mkdir(parents=True)
    (runs[1].folder / "checkpoints" / ".owner").write_text("{}")
    (runs[1].folder / "metrics.jsonl").write_text('{"step": 40, "time": 1.0}\n')
    found = suite.left(1)
    assert found is not None
    assert found.middle == pytest.approx(30.0)


def built(source: type[Any], rows: list[dict[str, Any]], folder: Path, **settings: Any) -> Dataset:
    """A dataset of rows, which are trained on and held out alike."""
    files = folder / "train.jsonl", folder / "heldout.jsonl"
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = TokenizerConfig("", "wordpiece", 300, lowercase=False).train(
        ["".join(map(chr, range(33, 127)))]
    )
    tokenizer.save(folder / "tokenizer")
    config = source(paths=(str(files[0]),), heldout=(str(files[1]),), **settings)
    build(
        BuildConfig(
            config,
            TokenizerConfig(str(folder / "tokenizer")),
            output=str(folder / "data"),
            workers=1,
        )
    )
    return Dataset.open(folder / "data")


def test_of_choices_the_one_that_is_right_most_often(tmp_path: Path) -> None:
    rows = [
        {"context": f"c{i}", "choices": ["a", "b", "c"], "label": label}
        for i, label in enumerate((2, 1, 2, 0, 2))
    ]
    dataset = built(multiple_choice.Config, rows, tmp_path)
    objective = choosing.Config(choices=3).build(dataset.tokenizer.vocabulary)
    assert constant_scores(objective, dataset, ["accuracy"]) == {"accuracy": pytest.approx(3 / 5)}


def test_of_questions_those_without_an_answer_where_there_may_be_none(tmp_path: Path) -> None:
    answered = {
        "question": "Who?",
        "context": "Ann did.",
        "answers": [{"text": "Ann", "answer_start": 0}],
    }
    rows = [{**(answered if i else {**answered, "answers": []}), "id": str(i)} for i in range(4)]
    dataset = built(question_answering.Config, rows, tmp_path)
    for impossible, expected in ((True, 1 / 4), (False, 0.0)):
        objective = answering.Config(impossible=impossible).build(dataset.tokenizer.vocabulary)
        found = constant_scores(objective, dataset, ["f1", "exact_match"])
        assert found == {"f1": expected, "exact_match": expected}
        if impossible:
            of_kinds = ("has_answer_f1", "has_answer_exact_match", "no_answer_accuracy", "best_f1")
            found = constant_scores(objective, dataset, of_kinds)
            assert list(found.values()) == [0.0, 0.0, 1.0, expected]


@pytest.mark.parametrize(
    ("labels", "score", "expected"),
    [
        (("no", "yes"), "accuracy", 3 / 5),
        (("no", "yes"), "f1", 2 * 0.4 / 1.4),
        ((), "accuracy", 0.0),
    ],
)
def test_of_texts_the_label_that_is_right_most_often(
    labels: tuple[str, ...], score: str, expected: float, tmp_path: Path
) -> None:
    rows = [
        {"source": f"s{i}", "target": target}
        for i, target in enumerate(("no", "yes", "no", "yes", "no"))
    ]
    dataset = built(table_pairs.Config, rows, tmp_path, labels=labels)
    objective = seq2seq.Config(target_length=8)
    assert constant_scores(objective, dataset, [score])[score] == pytest.approx(expected)


def test_the_end_of_what_chance_explains_is_wilsons_interval() -> None:
    """As statsmodels' proportion_confint(279, 408, method="wilson") has it."""
    assert upper_end("accuracy", 279 / 408, 408) == pytest.approx(0.7271, abs=1e-4)
    # Of a constant answer that scores nothing, some rows are still right by accident.
    assert upper_end("entity_f1", 0.0, 100) == pytest.approx(0.0370, abs=1e-4)
    assert upper_end("pearson", 0.0, 400) == pytest.approx(0.098, abs=1e-3)
    assert upper_end("accuracy", 0.5, 10) > upper_end("accuracy", 0.5, 1000) > 0.5
