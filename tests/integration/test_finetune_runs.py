"""The runs of a suite: what they depend on, and which of their results the table has."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from data_pipeline.order.example_order import Order
from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import ConfigError
from tests.integration import tasks
from trainer.studies.finetune.page import write_page
from trainer.studies.finetune.runs import Run, list_runs
from trainer.studies.finetune.suite import Result, Suite
from trainer.studies.finetune.table import as_table, notes, summarize
from trainer.studies.finetune.task import PublishedModel, Task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.read(tasks.write_task("classification", tmp_path_factory.mktemp("task")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("suite")


def scored(run: Run, accuracy: float, **more: float) -> Result:
    return Result(
        run.task,
        run.name,
        run.settings,
        run.seed,
        run.digest,
        {"accuracy": accuracy, **more},
        10,
        1.0,
        accuracy > 0.5,
    )


def test_another_setting_checkpoint_or_row_is_another_run(
    finished_run: Path, task: Task, folder: Path, tmp_path: Path
) -> None:
    def runs(checkpoint: Path, *overrides: str) -> set[str]:
        return {
            run.folder.name
            for run in list_runs(str(checkpoint), [task], folder, range(2), False, overrides)
        }

    first = runs(finished_run)
    assert len(first) == 2
    assert runs(finished_run) == first
    assert not runs(finished_run, "model.dropout=0.3") & first
    assert not runs(finished_run, "training.steps=7") & first
    copied = shutil.copytree(finished_run, tmp_path / "run")
    elsewhere = runs(copied)
    shutil.rmtree(max((copied / "checkpoints").glob("step-*")))
    assert len(runs(copied) | elsewhere) == 4, "the same place, and other weights"
    train = Path(task.config.source.paths[0])
    text = train.read_text()
    train.write_text(text + text.splitlines()[0] + "\n")
    try:
        assert not runs(finished_run) & first
    finally:
        train.write_text(text)


def test_what_is_set_on_the_command_line_is_not_varied(
    finished_run: Path, task: Task, folder: Path
) -> None:
    grid = list_runs(str(finished_run), [task], folder, range(1), True, [])
    assert [dict(run.settings) for run in grid] == [{"optimizer.lr": 3e-3}, {"optimizer.lr": 1e-3}]
    (run,) = list_runs(
        str(finished_run), [task], folder, range(1), True, ["optimizer.lr=0.5", "training.steps=40"]
    )
    assert (dict(run.settings), run.name, run.experiment["optimizer"]["lr"]) == ({}, "seed-0", 0.5)
    assert run.experiment["schedule"]["warmup_steps"] == 4, "a tenth of the steps that the run has"


@pytest.mark.parametrize(
    ("epochs", "overrides", "expected"),
    [
        (1.0, [], {"kind": "adamw", "unfreeze_every": 8}),
        (
            0.01,
            ["optimizer={kind: lamb, betas: [0.8, 0.9]}"],
            {"kind": "lamb", "unfreeze_every": 1},
        ),
        (1.0, ["training.steps=3"], {"kind": "adamw", "unfreeze_every": 8}),
        (1.0, ["optimizer.unfreeze_every=5"], {"kind": "adamw", "unfreeze_every": 5}),
        (None, [], {"kind": "adamw"}),
    ],
)
def test_layers_are_unfrozen_by_passes_over_the_rows(
    epochs: float | None,
    overrides: list[str],
    expected: dict[str, object],
    finished_run: Path,
    task: Task,
    folder: Path,
) -> None:
    """96 rows in batches of 12 are 8 steps."""
    own = replace(task, config=replace(task.config, unfreeze_epochs=epochs))
    (run,) = list_runs(str(finished_run), [own], folder, range(1), False, overrides)
    found = run.experiment["optimizer"]
    assert {name: found.get(name) for name in expected} == expected
    assert ("unfreeze_every" in found) == ("unfreeze_every" in expected)


def test_rows_of_a_small_task_are_read_equally_often(
    finished_run: Path, task: Task, folder: Path
) -> None:
    def reads(*overrides: str) -> list[int]:
        """How often each of 96 rows is read in 20 passes, without doubles."""
        plain = replace(task, experiment={"accelerator": "cpu"})
        (run,) = list_runs(str(finished_run), [plain], folder, range(1), False, overrides)
        lanes = run.experiment["data"].get("lanes", DataConfig.lanes)
        order = Order([96], seed=0, lanes=lanes)
        return sorted(set(np.bincount(order.locate(np.arange(96 * 20)).index).tolist()))

    assert reads() == [20]
    # 32 of 64 lanes have two rows, and the others have one, which is read twice as often.
    assert reads("data.lanes=64") == [15, 30]


def test_the_table_has_the_results_of_these_runs_alone(
    finished_run: Path, task: Task, folder: Path
) -> None:
    before = list_runs(str(finished_run), [task], folder, range(3), False, ["model.dropout=0.5"])
    runs = list_runs(str(finished_run), [task], folder, range(3), False, [])
    results = {run.digest: scored(run, 1.0) for run in before}
    assert summarize([task], runs, results) == []
    results |= {
        run.digest: scored(run, accuracy)
        for run, accuracy in zip(runs, (0.7, 0.9, 0.5), strict=True)
    }
    (row,) = summarize([task], runs, results)
    assert (list(row.values), len(row.runs), row.learned) == ([0.7, 0.9, 0.5], 3, 2)
    # t of 2 degrees of freedom is 4.303, and the standard error 0.2 / sqrt(3).
    assert row.interval == pytest.approx((0.7 - 0.4968, 0.7 + 0.4968), abs=1e-4)
    assert row.columns()[2:8] == (
        *("70.0", "20.0", "20.3 to 119.7"),
        *("50.0", "2 of 3", "70.0 90.0 50.0"),
    )
    assert replace(runs[0], seed=1).name == runs[1].name


def test_the_table_says_who_has_published_what(
    finished_run: Path, task: Task, folder: Path, tmp_path: Path
) -> None:
    others = [
        replace(task, name=name, config=replace(task.config, published_by="A & B"))
        for name in ("b", "c")
    ]
    tasks_ = [
        others[0],
        task,
        others[1],
        replace(others[1], name="d", config=replace(task.config, published={})),
    ]
    runs = list_runs(str(finished_run), tasks_, folder, range(1), False, [])
    rows = summarize(tasks_, runs, {run.digest: scored(run, 1.0) for run in runs})
    assert "learned: runs whose selecting score exceeds it by more than chance" in notes(rows)
    whose = "Published: b, c: A & B; classification: BERT-base (Devlin et al. 2019)."
    assert notes(rows).endswith(whose)
    write_page(rows, "title", tmp_path / "table.html")
    assert whose.replace("&", "&amp;") in (tmp_path / "table.html").read_text()


def test_the_table_has_all_scores_of_a_task_and_says_once_of_which_runs(
    finished_run: Path, task: Task, folder: Path
) -> None:
    first = replace(
        task, config=replace(task.config, score="f1"), also={"other": task.config.source}
    )
    second = replace(task, name="second")
    runs = list_runs(str(finished_run), [first, second], folder, range(1), True, [])
    assert len(runs) == 4
    more = {"matthews": 0.5, "f1": 0.8, "loss": 2.0, "other/matthews": 0.2, "other/loss": 1.0}
    rows = summarize([first, second], runs, {run.digest: scored(run, 0.9, **more) for run in runs})
    columns = {str(column.header): list(column.cells) for column in as_table(rows).columns}
    names = ["f1", "accuracy", "matthews"]
    # Of the other point of the grid only the score that runs are compared by.
    expected = [*names, "other/matthews", "f1", "accuracy", "f1", "matthews", "accuracy"]
    assert columns["score"] == expected
    assert columns["task"] == ["classification", "", "", "", "", "second", "", "", ""]
    best, other = "lr 0.003", "lr 0.001"
    assert columns["settings"] == [best, "", "", "", other, best, "", "", other]
    learned = "1 of 1"
    assert columns["learned"] == [learned, "", "", "", learned, learned, "", "", learned]
    f1, accuracy, matthews = "80.0", "90.0", "50.0"
    assert columns["mean"] == [
        *(f1, accuracy, matthews, "20.0", f1),
        *(accuracy, f1, matthews, accuracy),
    ]
    # What a constant answer scores stands in every row: of two classes of 30 rows each.
    constants = ["66.7", "50.0", "0.0", "0.0", "66.7", "50.0", "66.7", "0.0", "50.0"]
    assert columns["constant"] == constants
    assert "of each seed" not in columns


def test_a_point_of_the_grid_without_a_score_is_not_the_best(
    finished_run: Path, task: Task, folder: Path
) -> None:
    runs = list_runs(str(finished_run), [task], folder, range(3), True, [])
    scores = (math.nan, math.nan, 0.9, 0.1, 0.2, 0.3)  # three seeds of either rate
    results = {run.digest: scored(run, value) for run, value in zip(runs, scores, strict=True)}
    (best, *_) = summarize([task], runs, results)
    assert list(best.values) == [0.1, 0.2, 0.3]


def test_several_evaluations_make_the_best_one_count(
    finished_run: Path, task: Task, folder: Path
) -> None:
    several = replace(task, config=replace(task.config, evaluations=4, patience=2))
    (run,) = list_runs(str(finished_run), [several], folder, range(1), False, [])
    training = run.experiment["training"]
    assert training["evaluate_every"] == training["steps"] // 4
    assert training["best"] == {"metric": "accuracy", "mode": "max", "patience": 2}
    assert run.keeps_best


def test_runs_may_start_from_those_of_another_task(
    finished_run: Path, task: Task, folder: Path
) -> None:
    after = Task("after", replace(task.config, start=task.name), task.experiment)
    runs = list_runs(str(finished_run), [after, task], folder, range(2), False, [])
    assert [run.task for run in runs] == [task.name] * 2 + ["after"] * 2
    first = tuple(run.digest for run in runs[:2])
    assert [run.start for run in runs] == [(), (), first, first]
    assert "init_from" not in runs[2].experiment
    others = list_runs(
        str(finished_run), [after, task], folder, range(2), False, ["model.dropout=0.3"]
    )
    assert not {run.digest for run in runs} & {run.digest for run in others}
    with pytest.raises(ConfigError, match="starts from classification, which is not among --tasks"):
        list_runs(str(finished_run), [after], folder, range(1), False, [])


def test_runs_from_random_weights_have_the_same_model_and_steps(
    finished_run: Path, task: Task, folder: Path
) -> None:
    run, scratch = list_runs(
        str(finished_run),
        [task],
        folder,
        range(1),
        False,
        ["model.dropout=0.3"],
        starts=("checkpoint", "random"),
    )
    assert (run.scratch, scratch.scratch) == (False, True)
    assert scratch.experiment["training"] == run.experiment["training"]
    assert "init_from" not in scratch.experiment
    model = scratch.experiment["model"]
    assert (model["kind"], model["layers"], model["head"], model["dropout"]) == (
        "bert",
        2,
        "classification",
        0.3,
    )
    rows = summarize(
        [task], [run, scratch], {run.digest: scored(run, 0.9), scratch.digest: scored(scratch, 0.6)}
    )
    assert [row.columns()[:3] for row in rows] == [
        ("classification", "accuracy", "90.0"),
        ("classification, random", "accuracy", "60.0"),
    ]
    assert [row.published for row in rows] == [50.0, None]


def test_a_score_that_the_objective_does_not_give_is_noticed_before_training(
    finished_run: Path, tmp_path: Path, folder: Path
) -> None:
    for kind in ("tagging", "question_answering", "regression", "multiple_choice"):
        task = Task.read(tasks.write_task(kind, tmp_path))
        with pytest.raises(ConfigError, match="score is 'bleu', and the objective gives"):
            list_runs(
                str(finished_run),
                [replace(task, config=replace(task.config, score="bleu"))],
                folder,
                1,
                False,
                [],
            )


def test_a_finished_run_is_made_again_where_it_is_needed_as_a_start_and_its_checkpoint_is_gone(
    finished_run: Path, task: Task, tmp_path: Path
) -> None:
    after = Task("after", replace(task.config, start=task.name), task.experiment)
    runs = list_runs(str(finished_run), [task, after], tmp_path, range(2), False, [])
    lines = [
        json.dumps(asdict(scored(run, accuracy)))
        for run, accuracy in zip(runs, (0.7, 0.9), strict=False)
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert Suite(tmp_path, runs).missing() == runs[1:], (
        "the best of the first task, and the second task"
    )
    shutil.copytree(finished_run / "checkpoints", runs[1].folder / "checkpoints")
    assert Suite(tmp_path, runs).missing() == runs[2:]


@pytest.mark.parametrize("first", [0.7, math.nan])
def test_the_best_run_of_a_task_keeps_its_checkpoint_or_all_do(
    first: float, finished_run: Path, task: Task, tmp_path: Path
) -> None:
    runs = list_runs(str(finished_run), [task], tmp_path, range(3), False, [])
    lines = [
        json.dumps(asdict(scored(run, accuracy)))
        for run, accuracy in zip(runs, (first, 0.9, 0.8), strict=True)
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    for run in runs:
        (run.folder / "checkpoints").mkdir(parents=True)
    for keep, kept in ((True, runs), (False, runs[1:2])):
        assert Suite(tmp_path, runs, keep).make([{}], lambda run, result: None) == []
        assert [run for run in runs if (run.folder / "checkpoints").exists()] == kept


def test_rows_of_several_sequences_are_not_grouped_by_length(
    finished_run: Path, tmp_path: Path, folder: Path
) -> None:
    """As BERT's recipe has it for all tasks."""
    for kind, size in (("classification", 32), ("multiple_choice", None)):
        task = Task.read(
            tasks.write_task(kind, tmp_path), {"experiment": {"data": {"group_by_length": 32}}}
        )
        (run,) = list_runs(str(finished_run), [task], folder, range(1), False, [])
        assert run.experiment["data"]["group_by_length"] == size


def test_controls_and_runs_from_another_task_start_with_all_that_they_have(
    finished_run: Path, task: Task, folder: Path
) -> None:
    after = Task("after", replace(task.config, start=task.name), task.experiment)
    changes = ["model.peft=lora", "redraw_layers=1"]
    first, control, second = list_runs(
        str(finished_run),
        [task, after],
        folder,
        range(1),
        False,
        changes,
        starts=("checkpoint", "random"),
    )
    assert (first.experiment["redraw_layers"], first.experiment["model"]["peft"]) == (1, "lora")
    assert (control.experiment["redraw_layers"], control.experiment["model"]["peft"]) == (0, None)
    assert second.experiment["redraw_layers"] == 0
    with pytest.raises(ConfigError, match=r"training\.best is set by the suite"):
        list_runs(str(finished_run), [task], folder, range(1), False, ["training.best.metric=loss"])


def test_a_metric_that_no_run_has_is_left_out_of_the_table(
    finished_run: Path, task: Task, folder: Path
) -> None:
    more = replace(
        task, config=replace(task.config, published={"accuracy": 50.0, "mismatched/accuracy": 40.0})
    )
    runs = list_runs(str(finished_run), [more], folder, range(1), False, [])
    (row,) = summarize([more], runs, {run.digest: scored(run, 0.9) for run in runs})
    assert row.metric == "accuracy"


def test_a_run_that_only_luck_lifts_above_a_constant_answer_has_not_learned(
    finished_run: Path, task: Task, folder: Path
) -> None:
    runs = list_runs(str(finished_run), [task], folder, range(3), False, [])
    assert runs[0].constants["accuracy"] == 0.5
    assert 0.62 < runs[0].learns_above < 0.63, "Wilson's interval of 30 of 60 rows"
    scores = (0.55, 0.6, 0.61)
    results = {run.digest: scored(run, x) for run, x in zip(runs, scores, strict=True)}
    (row,) = summarize([task], runs, results)
    assert row.columns()[6] == "0 of 3"


def test_published_scores_stand_beside_their_model_and_all_rows_alone(
    finished_run: Path, task: Task, folder: Path
) -> None:
    def published(task: Task, *settings: str) -> float | None:
        (run,) = list_runs(str(finished_run), [task], folder, range(1), False, settings)
        return summarize([task], [run], {run.digest: scored(run, 1.0)})[0].published

    def of(kind: str, layers: int | None = None) -> Task:
        model = PublishedModel(kind=kind, layers=layers)
        return replace(task, config=replace(task.config, published_model=model))

    assert published(task) == 50.0
    assert published(of(kind="bert", layers=2)) == 50.0
    assert published(of(kind="bert", layers=12)) is None
    assert published(of(kind="roberta")) is None
    assert published(task, "training.evaluate_batches=1") is None
    assert published(replace(task, own_rows=frozenset({""}))) is None


def test_the_page_links_to_each_run_and_follows_the_readers_colors(
    finished_run: Path, task: Task, tmp_path: Path
) -> None:
    name = replace(task, name="a <b> & c")
    runs = list_runs(str(finished_run), [name], tmp_path, range(3), True, [])
    for run in runs[:2]:
        run.folder.mkdir(parents=True)
        (run.folder / "predictions.jsonl").write_text("")
    scores = (0.7, 0.9, 0.5, 0.6, 0.6, 0.6)
    results = {run.digest: scored(run, x) for run, x in zip(runs, scores, strict=True)}
    rows = summarize([name], runs, results)
    assert [row.best for row in rows] == [True, False]
    write_page(rows, "title <i>", tmp_path / "table.html")
    page = (tmp_path / "table.html").read_text()
    assert "@media (prefers-color-scheme: dark)" in page
    assert "a &lt;b&gt; &amp; c" in page
    assert "<i>" not in page
    assert page.count("<circle") == 6
    assert page.count('class="interval"') == 2
    assert page.count('class="constant"') == 2
    links = re.findall(r'href="([^"]*predictions.jsonl)"', page)
    assert [(tmp_path / unquote(link)).is_file() for link in links] == [True, True]
    assert "seed 1: 90.0" in page
    assert "report.html" not in page, "no run has a report here"
