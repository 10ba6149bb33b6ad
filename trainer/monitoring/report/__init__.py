"""`samestep report`: one self-contained HTML page about one or several runs.

This module reads run folders and downsamples their metrics; page.js plots them. Data of a run is
in the page as JSON only, which the script inserts as text, so no name can be interpreted as HTML.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from trainer.config import Tree
from trainer.config.renamed import read_stored
from trainer.errors import ConfigError, DataError, SamestepError
from trainer.monitoring.jsonl import Row, read_rows

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, tuple[Ints, Floats]]
"""By metric: the indices of the rows that have it, and its values there."""

Numbers: TypeAlias = list[float | None]
"""JSON has no infinity and no NaN."""

_SMOOTHING = 50  # a moving average covers 1/50 of a curve
_BUCKETS = 400  # of a curve, about one for each pixel of a chart
_MOST_RUNS = 10  # colors that one can tell apart
_NOT_SMOOTHED = ("train/lr", "heldout/")
_NOT_PLOTTED = ("train/tokens", "train/examples", "perf/eta_seconds", "perf/energy_joules")


class Curve(TypedDict):
    """Row indices and values of a metric, and of its moving average if it has enough rows."""

    at: list[int]
    y: Numbers
    mean_at: NotRequired[list[int]]
    mean: NotRequired[Numbers]


class Described(TypedDict):
    """A run, as page.js reads it."""

    name: str
    path: str
    summary: dict[str, float | None]
    axes: dict[str, Numbers]
    series: dict[str, Curve]
    shares: dict[str, float]
    starts: list[Row]


def write_report(
    runs: Sequence[str],
    output: Path,
    planned_memory: Callable[[Path], float | None] = lambda run: None,
) -> None:
    """Writes the page. A run may still be running.

    Args:
        runs: at most 10 run folders.
        output: the HTML file.
        planned_memory: returns the peak that `samestep plan` predicts for a run, in GiB of a
            device; None if unknown.

    Raises:
        ConfigError: there are too many runs, or a folder is not a run.
        DataError: no run has metrics.
        SamestepError: the file cannot be written.
    """
    if len(runs) > _MOST_RUNS:
        raise ConfigError(
            f"a report shows at most {_MOST_RUNS} runs, not {len(runs)}; leave some out"
        )
    configs: list[Tree] = []
    described: list[Described] = []
    for run, name in zip(map(Path, runs), _names(runs), strict=True):
        configs.append(_read_config(run))
        described.append(_describe(run, name, configs[-1]))
    if not any(each["series"] for each in described):
        raise DataError(
            f"{', '.join(runs)} has no metrics yet; train for at least training.log_every steps"
        )
    for each in described:
        each["summary"]["planned_memory_gib"] = planned_memory(Path(each["path"]))
    data = {"runs": described, "settings": _settings(configs)}
    page, style, script = (_resource(f"page.{kind}") for kind in ("html", "css", "js"))
    parts = {
        "TITLE": html.escape(" · ".join(each["name"] for each in described)),
        "STYLE": style,
        "SCRIPT": script,
        # Inside <script>, "<" is the only character that could end the script.
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    page = re.sub("__(TITLE|STYLE|SCRIPT|DATA)__", lambda found: parts[found[1]], page)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        raise SamestepError(
            f"cannot write the report {output}: {error.strerror}; choose another file"
        ) from error


def _resource(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _names(runs: Sequence[str]) -> list[str]:
    """Names of runs: the last part of their paths, or as many parts as make them differ."""
    paths = [Path(run).resolve().parts for run in runs]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read_config(folder: Path) -> Tree:
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is no run (no config.yaml in it); name the output folder of a run"
        )
    return read_stored(folder / "config.yaml")


def _describe(folder: Path, name: str, config: Tree) -> Described:
    rows = list(read_rows(folder / "metrics.jsonl"))
    starts = list(read_rows(folder / "starts.jsonl"))
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    hours = _hours(np.array([row["time"] for row in rows]), [start["time"] for start in starts])
    tokens = np.array([row.get("train/tokens", np.nan) for row in rows])
    known = np.isfinite(tokens)
    if known.any():
        tokens = np.interp(steps, np.append(0, steps[known]), np.append(0, tokens[known]))
    columns = _columns(rows)
    series = {
        metric: _series(*column, smooth=not metric.startswith(_NOT_SMOOTHED))
        for metric, column in columns.items()
        if metric not in _NOT_PLOTTED and not metric.startswith("time/")
    }
    used = _renumber(series)
    return {
        "name": name,
        "path": str(folder.resolve()),
        "summary": _summary(config, columns, steps, hours, tokens, starts),
        "axes": {
            "step": _rounded(steps[used]),
            "tokens": _rounded(tokens[used]),
            "hours": _rounded(hours[used]),
        },
        "series": series,
        "shares": _shares(columns, steps),
        "starts": starts,
    }


def _renumber(series: Mapping[str, Curve]) -> Ints:
    """Renumbers the row indices of curves to the rows that any curve uses; returns these rows."""
    places = [curve["at"] for curve in series.values()]
    places += [curve["mean_at"] for curve in series.values() if "mean_at" in curve]
    used = np.unique(np.concatenate([np.array([], dtype=np.int64), *places]))
    for rows in places:
        rows[:] = np.searchsorted(used, rows).tolist()
    return used


def _columns(rows: Iterable[Row]) -> Columns:
    """By metric: the indices of the rows that have a finite value, and the values."""
    places, values = defaultdict(list), defaultdict(list)
    for place, row in enumerate(rows):
        for metric, value in row.items():
            if (
                metric not in ("step", "time")
                and isinstance(value, int | float)
                and abs(value) < np.inf
            ):
                places[metric].append(place)
                values[metric].append(value)
    return {
        metric: (np.array(places[metric]), np.array(values[metric], dtype=np.float64))
        for metric in places
    }


def _hours(times: Floats, starts: Sequence[float]) -> Floats:
    """Hours of training up to each row, without the pauses between an end and the next start.

    For example, starts at 10:00 and 12:00 and rows at 10:30, 12:15 and 12:45 give 0.5, 0.75 and
    1.25.
    """
    if not len(times):
        return times
    begins = np.array([start for start in starts if start <= times[0]][-1:] or times[:1])
    begins = np.append(begins, [start for start in starts if start > times[0]])
    # Rows before the first start can occur when a clock was set back.
    session = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
    elapsed = np.maximum(times - begins[session], 0)
    length = np.zeros(len(begins))
    np.fmax.at(length, session, elapsed)
    before: Floats = np.cumsum(length) - length
    hours: Floats = (before[session] + elapsed) / 3600
    return hours


def _series(places: Ints, values: Floats, smooth: bool) -> Curve:
    """A curve of at most 2 x `_BUCKETS` points: the minimum and maximum of each, so peaks stay."""
    kept = np.arange(len(values))
    if len(values) > 2 * _BUCKETS:
        edges = np.linspace(0, len(values), _BUCKETS + 1).astype(int)
        cuts = [(begin, values[begin:end]) for begin, end in itertools.pairwise(edges)]
        extremes = [begin + place for begin, cut in cuts for place in (cut.argmin(), cut.argmax())]
        kept = np.unique([0, *extremes, len(values) - 1])
    curve: Curve = {"at": places[kept].tolist(), "y": _rounded(values[kept])}
    if smooth and len(values) >= 2 * _SMOOTHING:
        window = np.ones(len(values) // _SMOOTHING)
        mean = np.convolve(values, window, "same") / np.convolve(
            np.ones(len(values)), window, "same"
        )
        kept = np.unique(np.linspace(0, len(values) - 1, _BUCKETS).astype(int))
        curve["mean_at"], curve["mean"] = places[kept].tolist(), _rounded(mean[kept])
    return curve


def _shares(columns: Columns, steps: Floats) -> dict[str, float]:
    """Fractions of the run's time by section; each row is weighted by its seconds."""
    if "perf/seconds_per_step" not in columns:
        return {}
    places, per_step = columns["perf/seconds_per_step"]
    seconds, evaluation = np.zeros(len(steps)), np.zeros(len(steps))
    if "time/evaluation" in columns:
        evaluation[columns["time/evaluation"][0]] = columns["time/evaluation"][1]
    # seconds_per_step excludes evaluations, whose fraction is of the whole time.
    seconds[places] = per_step * np.diff(steps[places], prepend=0)
    seconds /= np.maximum(1 - evaluation, 1e-9)
    return {
        name.removeprefix("time/"): round(
            float(shares @ seconds[rows] / max(seconds.sum(), 1e-9)), 5
        )
        for name, (rows, shares) in columns.items()
        if name.startswith("time/") and not name.startswith("time/communication")
    }


def _summary(
    config: Tree,
    columns: Columns,
    steps: Floats,
    hours: Floats,
    tokens: Floats,
    starts: Sequence[Row],
) -> dict[str, float | None]:
    """The run's row of the summary table; None for unknown figures."""

    def figure(metric: str, reduce: Callable[[Floats], float]) -> float | None:
        return float(reduce(columns[metric][1])) if metric in columns else None

    return {
        "step": int(steps[-1]) if len(steps) else 0,
        "steps": config.get("training", {}).get("steps"),
        "train_loss": figure(
            "train/loss", lambda values: values[-max(1, len(values) // _SMOOTHING) :].mean()
        ),
        "heldout_loss": figure("heldout/loss", lambda values: values[-1]),
        "best_heldout_loss": figure("heldout/loss", np.min),
        "tokens": float(tokens[-1]) if len(tokens) and np.isfinite(tokens[-1]) else None,
        "hours": float(hours[-1]) if len(hours) and np.isfinite(hours[-1]) else None,
        "tokens_per_second": figure("perf/tokens_per_second", np.median),
        "mfu": figure("perf/mfu", np.median),
        "mfu_useful": figure("perf/mfu_useful", np.median),
        "padding": figure("data/padding_fraction", np.mean),
        "peak_memory_gib": figure("perf/peak_memory_gib", np.max),
        "peak_rss_gib": figure("perf/peak_rss_gib", np.max),
        "energy_kwh": figure("perf/energy_joules", lambda values: values.sum() / 3.6e6),
        "communication": figure("time/communication_exposed", np.mean),
        "restarts": len(starts) - 1 if starts else None,
    }


def _settings(configs: Sequence[Tree]) -> list[dict[str, object]]:
    """All settings: dotted key, value in each run, and whether the values differ.

    The output folder always differs and is not marked.
    """
    flat = [_leaves(config) for config in configs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    table = [
        (key, [_value(settings[key]) if key in settings else "" for settings in flat])
        for key in keys
    ]
    return [
        {"key": key, "values": values, "differs": key != "output" and len(set(values)) > 1}
        for key, values in table
    ]


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _leaves(tree: Tree, path: str = "") -> Tree:
    flat: Tree = {}
    for key, value in tree.items():
        flat |= (
            _leaves(value, f"{path}{key}.")
            if isinstance(value, dict) and value
            else {f"{path}{key}": value}
        )
    return flat


def _rounded(values: Floats) -> Numbers:
    """Six significant digits: more than a pixel can show, in half the bytes of all."""
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in values.tolist()]


def default_output(runs: Sequence[str]) -> Path:
    """The default file: in the run folder, or for several runs in the working folder."""
    return Path(runs[0], "report.html") if len(runs) == 1 else Path(os.curdir, "report.html")
