"""The report says what is in the run folders, loses no peak, and lets no name become HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samestep.config import dump, load
from samestep.errors import ConfigError, DataError
from trainer.monitoring.report import Report, write_report
from trainer.training.experiment import Experiment


def write_run(
    folder: Path,
    rows: list[dict[str, Any]],
    starts: list[float] = (),
    lr: str = "0.001",
    first: int = 0,
) -> str:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"output: x\ntraining: {{steps: 1000}}\noptimizer: {{kind: adamw, lr: {lr}}}\n"
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    noted = [{"step": first, "time": time, "devices": "1 x CPU"} for time in starts]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in noted))
    return str(folder)


def training(steps: range, begin: float = 0.0, **metrics: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "time": begin + step,
            "train/loss": 5 - step / 1000,
            "train/tokens": 32 * step,
            **metrics,
        }
        for step in steps
    ]


def page_of(runs: list[str], folder: Path) -> tuple[str, dict[str, Any]]:
    write_report(runs, folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return page, json.loads(found[1])


def test_a_page_needs_nothing_else_and_says_what_was_measured(tmp_path: Path):
    rows = training(range(10, 310, 10), **{"perf/tokens_per_second": 320.0, "perf/mfu": 0.4})
    run = write_run(
        tmp_path / "run", [*rows, {"step": 300, "time": 301.0, "heldout/loss": 4.5}], [0.0, 200.5]
    )
    page, data = page_of([run], tmp_path)
    assert not re.search(r"(src|href)=|url\((?!#)|@import|https?://(?!www\.w3\.org)", page)
    (described,) = data["runs"]
    wanted = {
        "step": 300,
        "steps": 1000,
        "train_loss": 4.7,
        "heldout_loss": 4.5,
        "tokens": 9600,
        "restarts": 1,
    }
    assert described["summary"].items() >= wanted.items()
    assert described["summary"]["mfu"] == 0.4
    assert described["summary"]["energy_kwh"] is None
    setting = {"key": "optimizer.lr", "values": ["0.001"], "differs": False, "changed": False}
    assert setting in data["settings"]  # without a schema, no default is known
    assert described["series"]["heldout/loss"]["y"] == [4.5]


def test_shares_of_the_time_are_of_the_whole_run(tmp_path: Path):
    rows = training(
        range(10, 110, 10), **{"perf/seconds_per_step": 0.1, "time/optimizer": 1.0}
    )  # 1 second each
    rows[3] |= {"time/optimizer": 0.1, "time/evaluation": 0.9}  # and 9 seconds more
    rows.append({"step": 100, "time": 101.0, "time/communication": 0.5})
    _, data = page_of([write_run(tmp_path / "run", rows)], tmp_path)
    assert data["runs"][0]["shares"] == {
        "optimizer": pytest.approx(10 / 19, abs=1e-4),
        "evaluation": 0.47368,
    }


def test_shares_of_a_run_that_continues_another_leave_out_its_steps(tmp_path: Path):
    rows = training(range(100_010, 100_110, 10), **{"perf/seconds_per_step": 0.1})
    for number, row in enumerate(rows):  # a second each, but for 5 of the first
        row |= {"time/data_wait": 0.0, "time/forward": 1.0}
        if number == 0:
            row |= {"perf/seconds_per_step": 0.5, "time/data_wait": 0.8, "time/forward": 0.2}
    run = write_run(tmp_path / "run", rows, [100_000.0], first=100_000)
    _, data = page_of([run], tmp_path)
    assert data["runs"][0]["shares"] == {
        "data_wait": pytest.approx(4 / 14, abs=1e-4),
        "forward": pytest.approx(10 / 14, abs=1e-4),
    }


def test_no_name_value_or_setting_can_become_html(tmp_path: Path):
    evil = "</script><script>alert(1)</script><!--"
    rows = [{**row, f"train/{evil}": 1.0} for row in training(range(1, 5))]
    run = write_run(tmp_path / evil.replace("/", "") / "__DATA__ & 'run'", rows, lr=f'"{evil}"')
    page, data = page_of([run], tmp_path)
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert data["runs"][0]["name"] == "__DATA__ & 'run'"
    assert data["settings"][-1]["values"] == [evil]


def test_numbers_that_json_lacks_are_no_numbers_on_the_page(tmp_path: Path):
    run = write_run(tmp_path / "run", training(range(1, 3)))
    alert = {"step": 1, "time": 1.0, "level": "WARN", "title": "t", "text": "x"}
    (tmp_path / "run/alerts.jsonl").write_text(json.dumps({**alert, "loss": float("nan")}) + "\n")
    _, data = page_of([run], tmp_path)
    assert data["runs"][0]["faults"] == [{**alert, "loss": None}]


def test_thinning_keeps_the_peaks_the_ends_and_the_order(tmp_path: Path):
    rows = training(range(1, 20_001))
    rows[17_777]["train/loss"], rows[3_333]["train/loss"] = 99.0, -99.0
    _, data = page_of([write_run(tmp_path / "run", rows)], tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    run = data["runs"][0]
    series, steps = run["series"]["train/loss"], run["axes"]["step"]
    points = dict(zip((steps[row] for row in series["at"]), series["y"], strict=True))
    assert (points[17_778], points[3_334]) == (99.0, -99.0)
    assert {1, 20_000} <= points.keys()
    assert sorted(points) == list(points)
    assert len(series["mean"]) == 400


def test_hours_leave_out_the_pauses_between_starts(tmp_path: Path):
    rows = [*training(range(1, 3601)), *training(range(3601, 7201), begin=1e6)]
    run = write_run(tmp_path / "run", rows, starts=[0.0, 1e6 + 3600])
    _, data = page_of([run], tmp_path)
    hours = data["runs"][0]["axes"]["hours"]
    assert hours[-1] == pytest.approx(2.0)
    assert np.all(np.diff(hours) >= 0)


def test_runs_of_the_same_name_with_other_settings_and_metrics_stand_side_by_side(tmp_path: Path):
    first = write_run(tmp_path / "a" / "run", training(range(1, 100)))
    second = write_run(
        tmp_path / "b" / "run", training(range(1, 5), **{"train/nsp_loss": 0.7}), lr="0.002"
    )
    waiting = write_run(tmp_path / "c" / "run", [])
    (tmp_path / "c" / "run" / "metrics.jsonl").unlink()
    _, data = page_of([first, second, waiting], tmp_path)
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run", "c/run"]
    assert [setting["key"] for setting in data["settings"] if setting["differs"]] == [
        "optimizer.lr"
    ]
    assert data["runs"][1]["series"].keys() - data["runs"][0]["series"].keys() == {"train/nsp_loss"}
    assert data["runs"][2]["series"] == {}


def test_settings_that_differ_from_the_defaults_come_first(experiment_file: str, tmp_path: Path):
    experiment = load(Experiment, experiment_file, ["training.steps=7", "data.threads=0"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(experiment))
    settings = Report([str(run)], Experiment).data()["settings"]
    marks = [setting["changed"] for setting in settings]
    assert marks == sorted(marks, reverse=True)
    found = {setting["key"]: setting["changed"] for setting in settings}
    assert found["training.steps"]
    assert found["data.threads"]
    assert not found["training.dropout_version"]
    assert sum(marks) < len(marks) / 2


def test_what_cannot_be_reported_is_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run"):
        write_report([str(tmp_path)], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="at most 10 runs, not 11"):
        write_report([str(tmp_path)] * 11, tmp_path / "report.html")
    with pytest.raises(DataError, match="has no metrics yet"):
        write_report([write_run(tmp_path / "run", [])], tmp_path / "report.html")


def test_runs_of_a_suite_are_named_by_task_rate_and_seed_and_curves_by_the_task(tmp_path: Path):
    place = tmp_path / "suite" / "runs" / "rte"
    names = ("lr-2e-05-global_batch_size-32-seed-0", "lr-2e-05-scratch-seed-1")
    runs = []
    for number, name in enumerate(names):
        runs.append(write_run(place / f"{name}-0123abc{number}", training(range(10, 30, 10))))
        (Path(runs[-1]) / "experiment.yaml").write_text("")
    _, data = page_of(runs, tmp_path)
    assert [run["name"] for run in data["runs"]] == [
        "rte, lr 2e-05, size 32, seed 0",
        "rte, random weights, lr 2e-05, seed 1",
    ]
    assert data["task"] == "rte"
    other = write_run(tmp_path / "other", training(range(10, 30, 10)))
    _, data = page_of([*runs, other], tmp_path)
    assert [run["name"] for run in data["runs"]][2] == "other"
    assert data["task"] is None


def test_curves_of_a_task_say_so_and_those_of_pre_training_name_masked_positions(tmp_path: Path):
    found = {}
    wrapped = "{kind: sift, of: {kind: question_answering}}"
    for name, objective in (
        ("a", "{kind: mlm}"),
        ("b", "{kind: tagging}"),
        ("c", wrapped),
        ("d", "of_another_machine.objective"),
        ("e", "replaced_mlm"),
        ("f", "tests.sick_objective"),
    ):
        run = write_run(tmp_path / name, training(range(10, 30, 10)))
        with (Path(run) / "config.yaml").open("a") as file:
            file.write(f"objective: {objective}\n")
        _, data = page_of([run], tmp_path)
        found[name] = data["task"], data["of_task"], data["masked"]
    assert found == {
        "a": (None, False, True),
        "b": ("tagging", True, False),
        "c": ("question answering", True, False),
        "d": (None, False, False),
        "e": (None, False, True),
        "f": (None, False, True),
    }


def test_a_run_may_lie_directly_under_the_root() -> None:
    assert Report(["/run-1f2e3d4c"]).names == ["run-1f2e3d4c"]
