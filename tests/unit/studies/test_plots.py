"""Plots of studies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trainer.studies.plots import _new_file, _of_curves
from trainer.studies.results import curve
from trainer.studies.study import Curves


def a_run(folder: Path, evaluations: int) -> Any:
    """A finished job of training with this number of evaluations."""
    folder.mkdir()
    steps = range(1, evaluations + 1)
    rows = [{"step": step, "time": 0.0, "heldout/loss": 9.0 - step} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(
        digest=folder.name,
        folder=folder,
        config=SimpleNamespace(product="."),
        result=lambda: {"scores": {}},
    )


def test_arms_that_share_a_run_share_a_line_and_a_single_step_has_none(tmp_path: Path) -> None:
    long, short = a_run(tmp_path / "long", 3), a_run(tmp_path / "short", 1)
    runs = {"random": short, "half": long, "all": long}
    jobs: Any = SimpleNamespace(of={(arm, 0, "pretrain"): run for arm, run in runs.items()})
    config = SimpleNamespace(arms=runs, repetitions=[0])
    results: Any = SimpleNamespace(study=SimpleNamespace(config=config))

    (axes,) = _of_curves(results, jobs, Curves(stage="pretrain")).axes

    (line,) = axes.lines
    assert line.get_label() == "half, all"
    assert np.array_equal(line.get_ydata(), [8.0, 7.0, 6.0])


def test_tokens_are_known_between_the_steps_that_are_logged(tmp_path: Path) -> None:
    """An evaluation every 10 steps has a place, too, if metrics are logged every 50."""
    rows = [{"step": step, "heldout/loss": 9.0} for step in range(10, 60, 10)]
    rows[-1]["train/tokens"] = 5000
    lines = [json.dumps(row | {"time": 0.0}) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    job: Any = SimpleNamespace(folder=tmp_path, config=SimpleNamespace(product="."))
    assert curve(job, "heldout/loss", "tokens")[0] == [1000, 2000, 3000, 4000, 5000]
    assert curve(job, "heldout/loss", "step")[0] == [10, 20, 30, 40, 50]


def test_plots_of_like_names_have_files_of_their_own(tmp_path: Path) -> None:
    files: list[Path] = []
    for _ in range(3):
        files.append(_new_file(tmp_path, "f1", files))
    assert [file.name for file in files] == ["f1.svg", "f1-2.svg", "f1-3.svg"]
