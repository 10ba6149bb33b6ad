"""The page of a suite: its table, with a plot of the seeds and links to the files of each run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from samestep.storage import write_text
from trainer.monitoring.report import MOST_RUNS, write_report
from trainer.studies.finetune.runs import Run
from trainer.studies.finetune.suite import PREDICTIONS, REPORT
from trainer.studies.finetune.table import HEADINGS, Row, columns, notes, percent
from trainer.studies.template import render
from trainer.training.experiment import Experiment

_WIDTH, _MARGIN = 150, 6  # of a plot in pixels


def write_page(rows: Sequence[Row], title: str, file: Path) -> None:
    """Writes the table as an HTML page, next to the folder of the runs."""
    headings, *lines = columns(rows)
    listed = [
        {
            "cells": list(zip(headings, line, strict=True)),
            "first": bool(line[0]),
            "plot": _plot(row, [other for other in rows if other.metric == row.metric]),
            "runs": _runs(row, file.parent) if line[headings.index("learned")] else [],
            "curves": _curves(row, file.parent),
        }
        for row, line in zip(rows, lines, strict=True)
    ]
    shown = [name for name in headings if name != HEADINGS[7]]
    values = {"title": title, "notes": notes(rows), "headings": shown, "lines": listed}
    write_text(file, render("finetune/page.html", **values))


def write_curves(rows: Sequence[Row], folder: Path) -> None:
    """Writes a report of the runs of each task at its best point: curves/TASK.html."""
    for row in rows:
        if row.best and row.metric == row.runs[0].score:
            runs = [str(run.folder) for run in row.runs[:MOST_RUNS]]
            write_report(runs, folder / _curves_file(row), schema=Experiment)


def _curves_file(row: Row) -> Path:
    return Path("curves", f"{row.task.name}{'-random' * row.scratch}.html")


def _curves(row: Row, folder: Path) -> str:
    file = _curves_file(row)
    return quote(str(file)) if row.best and (folder / file).exists() else ""


def _runs(row: Row, folder: Path) -> list[Mapping[str, object]]:
    """The runs of a row: seed, score, and links to the files that exist."""
    return [
        {
            "name": f"seed {run.seed}",
            "score": percent(value),
            "links": [
                (name, _link(run, name, folder))
                for name in ("", REPORT, PREDICTIONS, "log.txt")
                if (run.folder / name).exists()
            ],
        }
        for run, value in zip(row.runs, row.values, strict=True)
    ]


def _link(run: Run, name: str, folder: Path) -> str:
    return quote(os.path.relpath(run.folder / name, folder)) + "/" * (not name)


def _plot(row: Row, alike: Sequence[Row]) -> Mapping[str, object]:
    """Positions in pixels: of each seed, of the constant answer, and of the mean's interval."""
    # The rows of a task have one scale, so that its points and controls can be compared.
    ends = [
        value
        for other in alike
        if other.task.name == row.task.name
        for value in (other.constant, *other.values, *(other.interval or ()))
    ]
    low, high = min(ends), max(ends)

    def place(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(_MARGIN + share * (_WIDTH - 2 * _MARGIN), 1)

    return {
        "width": _WIDTH,
        "constant": place(row.constant),
        "mean": place(row.mean),
        "interval": [place(end) for end in row.interval or ()],
        "seeds": [
            (place(value), f"seed {run.seed}: {percent(value)}")
            for run, value in zip(row.runs, row.values, strict=True)
        ],
    }
