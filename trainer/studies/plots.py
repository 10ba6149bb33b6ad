"""Plots of a study, as SVG files that look right on light and dark pages."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import MissingExtra
from samestep.storage import write_text
from trainer.studies.jobs import Job, Jobs
from trainer.studies.results import Results, Row, curve
from trainer.studies.study import Curves, Measure, Relation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2563eb", "#dc6803", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
_GRAY = "#7b8494"  # of text and lines: readable on white and on black
_STYLE: Any = {
    "axes.edgecolor": _GRAY,
    "axes.labelcolor": _GRAY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.labelcolor": _GRAY,
    "svg.fonttype": "none",
    "svg.hashsalt": "samestep",  # the same file for the same numbers
    "text.color": _GRAY,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
}
_AXES = {"step": "step", "tokens": "tokens", "flops": "FLOPs"}


def write_plots(results: Results, jobs: Jobs, folder: Path) -> list[Path]:
    """Writes a plot for each measure and each entry of `relations` and `curves`.

    Returns:
        The files, in the order in which a page shows them.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "samestep study") from None
    config = results.study.config
    files: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for name, measure in config.measures.items():
            rows = results.of(name)
            if rows and not all(row.mean.is_exact for row in rows):
                files.append(_new_file(folder, _slug(name), files))
                _save(_of_measure(rows, name, measure), files[-1])
        for relation in config.relations:
            names = (_slug(relation.measure), _slug(relation.against))
            files.append(_new_file(folder, "-against-".join(names), files))
            _save(_of_relation(results, relation), files[-1])
        for curves in config.curves:
            axis = "" if curves.against == "step" else f"-against-{curves.against}"
            name = f"{_slug(curves.stage)}-{_slug(curves.metric)}{axis}"
            files.append(_new_file(folder, name, files))
            _save(_of_curves(results, jobs, curves), files[-1])
    return files


def _new_file(folder: Path, name: str, taken: Sequence[Path]) -> Path:
    """A file for a plot; the measures "F1" and "F1 +" get f1.svg and f1-2.svg."""
    file, number = folder / f"{name}.svg", 1
    while file in taken:
        number += 1
        file = folder / f"{name}-{number}.svg"
    return file


def _slug(name: str) -> str:
    """A file's name: "loss at 15 % masks" becomes loss_at_15_masks."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")


def _figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, file: Path) -> None:
    content = io.StringIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    write_text(file, content.getvalue())


def _of_measure(rows: Sequence[Row], name: str, measure: Measure) -> Figure:
    """A line for each arm: a point for each seed, the mean and its interval."""
    figure, axes = _figure(0.9 + 0.32 * len(rows))
    scale = 100 if measure.percent else 1
    for place, row in enumerate(rows):
        if row.mean.low is not None and row.mean.high is not None:
            ends = [scale * row.mean.low, scale * row.mean.high]
            axes.plot(ends, [place, place], color=_GRAY, linewidth=1.5)
        axes.plot(scale * row.mean.mean, place, "|", color=_GRAY, markersize=11)
        values = [scale * value for value in row.values]
        axes.plot(values, [place] * len(values), "o", color=_COLORS[0], alpha=0.75, markersize=5)
    axes.set_yticks(range(len(rows)), [row.arm for row in rows])
    axes.invert_yaxis()
    axes.margins(y=0.15)
    axes.grid(axis="x")
    axes.set_xlabel(f"{name}{', %' * measure.percent} ({measure.better} is better)")
    return figure


def _of_relation(results: Results, relation: Relation) -> Figure:
    """A point for each arm, with the interval of its mean."""
    figure, axes = _figure(3.4)
    measures = results.study.config.measures
    places = {row.arm: row.mean.mean for row in results.of(relation.against)}
    scale, across = (
        100 if measures[name].percent else 1 for name in (relation.measure, relation.against)
    )
    shown = [row for row in results.of(relation.measure) if row.arm in places]
    for number, row in enumerate(shown):
        color, x, mean = _COLORS[number % len(_COLORS)], across * places[row.arm], row.mean
        if mean.low is not None and mean.high is not None:
            axes.plot([x, x], [scale * mean.low, scale * mean.high], color=color, linewidth=1.5)
        axes.plot(x, scale * mean.mean, "o", color=color, label=row.arm, markersize=5)
    if relation.logarithmic:
        axes.set_xscale("log")
    for axis, name in ((axes.set_xlabel, relation.against), (axes.set_ylabel, relation.measure)):
        axis(f"{name}{', %' * measures[name].percent}")
    axes.margins(y=0.15)
    axes.grid()
    if shown:
        axes.legend(fontsize=8)
    return figure


def _of_curves(results: Results, jobs: Jobs, curves: Curves) -> Figure:
    """A color for each arm, a line for each seed. Arms that share their runs share a line."""
    figure, axes = _figure(3.4)
    runs: dict[str, Job] = {}
    arms: dict[tuple[str, ...], list[str]] = {}  # by the digests of their runs
    config = results.study.config
    for arm in config.arms:
        of_arm = [jobs.of.get((arm, seed, curves.stage)) for seed in config.repetitions]
        finished = {job.digest: job for job in of_arm if job is not None and job.result()}
        runs |= finished
        arms.setdefault(tuple(finished), []).append(arm)
    for number, (digests, names) in enumerate(arms.items()):
        color, style = _COLORS[number % len(_COLORS)], "-" if number < len(_COLORS) else "--"
        label = ", ".join(names)
        for digest in digests:
            xs, ys = curve(runs[digest], curves.metric, curves.against)
            if len(xs) > 1:  # one point is no line, as of a run of a single step
                axes.plot(xs, ys, style, color=color, label=label, linewidth=1.2, alpha=0.8)
                label = ""  # once for each arm
    axes.set_xlabel(_AXES[curves.against])
    axes.set_ylabel(f"{curves.stage}: {curves.metric}")
    axes.grid()
    if axes.lines:
        axes.legend(fontsize=8)
    return figure
