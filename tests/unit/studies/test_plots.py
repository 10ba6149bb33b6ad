"""Plots of studies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trainer.studies.plots import _of_curves
from trainer.studies.study import Curves


def a_run(folder: Path, evaluations: int) -> Any:
    """A finished job of training with so many evaluations."""
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
