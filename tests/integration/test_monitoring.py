"""What a real run writes down about itself, and the commands that show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.reading.dataset import Dataset
from samestep.config import load
from tests.integration.commands import Samestep
from tests.processes import run_ranks
from trainer.strategies import Replica
from trainer.training.compose import open_loader
from trainer.training.experiment import Experiment
from trainer.training.run import train


def rows_of(run: Path, metric: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    rows = (json.loads(line) for line in (run / file).read_text().splitlines())
    return [row for row in rows if metric in row]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
@pytest.mark.parametrize("file", ["experiment_file", "t5_experiment"])
def test_filled_cells_are_those_that_the_objective_gives_a_segment(
    file: str, packing: str, request: pytest.FixtureRequest
) -> None:
    experiment_file = request.getfixturevalue(file)
    experiment = load(Experiment, experiment_file, [f"data.packing={packing}", "data.threads=0"])
    dataset = Dataset.open(experiment.data.path)
    with open_loader(experiment, dataset, Replica(0, 3), experiment.resolved_phases()[0]) as loader:
        for batch in (batch for _, step in zip(range(20), loader, strict=False) for batch in step):
            sides = [batch[name] for name in ("segments", "target_segments") if name in batch]
            positions = sum((side > 0).sum(dim=1) for side in sides) * (batch["example"] >= 0)
            assert batch["filled"].tolist() == positions.tolist()


def train_here(file: str, overrides: list[str]) -> None:
    train(load(Experiment, file, overrides))


@pytest.mark.long
def test_rows_add_up_and_are_the_same_for_any_number_of_processes(
    experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    overrides = [
        f"output={run}",
        "training.evaluate_every=6",
        "checkpoint.every=5",
        "tracking.profile.start=2",
    ]
    run_ranks(2, train_here, experiment_file, overrides)
    rows, alone = rows_of(run, "train/loss"), rows_of(finished_run, "train/loss")
    assert len(rows) == 12
    for row in rows:
        shares = {name: value for name, value in row.items() if name.startswith("time/")}
        assert sum(shares.values()) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in shares.values())
        useful = row["perf/useful_tokens_per_second"] / row["perf/tokens_per_second"]
        assert useful == pytest.approx(1 - row["data/padding_fraction"])
        assert row["perf/peak_rss_gib"] > 0
    assert [row["data/padding_fraction"] for row in rows] == [
        row["data/padding_fraction"] for row in alone
    ]
    assert rows[5]["data/padding_fraction"] > 0
    assert "time/checkpoint" in rows[5]
    assert "time/evaluation" in rows[6]
    (profiled,) = rows_of(run, "time/communication")
    assert profiled["step"] == 4
    assert 0 < profiled["time/communication_exposed"] <= profiled["time/communication"] < 1
    assert [path.name for path in (run / "profiles").iterdir()] == [
        "step-00000002-rank-00000.json.gz"
    ]


@pytest.mark.long
def test_tensorboard_starts_and_report_of_a_run_that_goes_on(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    overrides = [f"output={run}", "tracking.tensorboard={}", "checkpoint.every=3", "data.threads=0"]
    assert samestep("train", experiment_file, *overrides, "training.steps=6").code == 0
    assert (
        samestep(
            "train", experiment_file, *overrides, "training.steps=9", "training.precision=bf16"
        ).code
        == 0
    )
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/train_loss")] == list(range(1, 10))
    starts = rows_of(run, "devices", "starts.jsonl")
    assert [(row["step"], row["precision"], row["strategy"]) for row in starts] == [
        (0, "fp32", "fsdp"),
        (6, "bf16", "fsdp"),
    ]
    page = tmp_path / "report.html"
    assert samestep("report", run, finished_run, "-o", page).out == f"{page}\n"
    text = page.read_text()
    assert '"restarts":1' in text
    assert "heldout/loss" in text
    assert samestep("report", run).out == f"{run / 'report.html'}\n"
    assert "is not a run" in samestep("report", tmp_path / "nothing").message


def test_doctor_tells_by_its_exit_code(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    sound = samestep("doctor", experiment_file, f"output={tmp_path}", "--processes", "1")
    assert sound.code == 0, sound.out
    ill = samestep(
        "doctor", experiment_file, f"output={tmp_path}", "data.path=nowhere", "--processes", "1"
    )
    assert ill.code == 1
    assert "failed" in ill.out
